"""Results of a method, computed once for each object and its arguments."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


def cached_method(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator that keeps a method's results in its object, by the hashable arguments.

    So they live as long as the object, and no cache refers to it. The object has a `__dict__`, frozen or not.
    """
    name = f"_{method.__name__}_results"

    @wraps(method)
    def from_cache(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(kwargs.items())) if kwargs else args
        try:
            known: T = self.__dict__[name][key]
        except KeyError:
            known = method(self, *args, **kwargs)
            self.__dict__.setdefault(name, {})[key] = known
        return known

    return from_cache
