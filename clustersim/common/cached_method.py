"""Results of a method, computed once for each object and its arguments, or a key of them."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


def cached_by(
    key: Callable[..., Hashable],
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Decorator that keeps a method's results in its object, by a key of its arguments.

    So they live as long as the object, and no cache refers to it. The object has a `__dict__`, frozen or not. Calls
    with equal keys have equal results.
    """

    def decorate(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        name = f"_{method.__name__}_results"

        @wraps(method)
        def from_cache(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            result_key = key(self, *args, **kwargs)
            try:
                return self.__dict__[name][result_key]  # type: ignore[no-any-return]
            except KeyError:
                pass
            result = method(self, *args, **kwargs)
            self.__dict__.setdefault(name, {})[result_key] = result
            return result

        return from_cache

    return decorate


def _all_arguments(_object: Any, /, *args: Any, **kwargs: Any) -> Hashable:
    return (args, tuple(kwargs.items())) if kwargs else args


def cached_method(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator that keeps a method's results in its object, by its hashable arguments."""
    return cached_by(_all_arguments)(method)
