"""Results of a method, computed once for each object and its arguments."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
_ABSENT: Final = object()


def cached_method(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator that keeps a method's results in its object, by the hashable arguments.

    So they live as long as the object, and no cache refers to it. The object has a `__dict__`, frozen or not.
    """
    name = f"_{method.__name__}_results"

    @wraps(method)
    def from_cache(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(kwargs.items())) if kwargs else args
        results: dict[Any, Any] = self.__dict__.get(name) or self.__dict__.setdefault(name, {})
        result: T = results.get(key, _ABSENT)
        if result is _ABSENT:
            result = results[key] = method(self, *args, **kwargs)
        return result

    return from_cache
