"""Enumerations with fast hashing."""

from enum import Enum


class IdentityEnum(Enum):
    """Enum hashed by identity, as members are singletons: the hash of Enum is a Python-level call each time."""

    __hash__ = object.__hash__
