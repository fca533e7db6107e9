"""What kind of value a setting takes: a wrong one is named with what is needed, before it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import NamedTuple

import numpy as np

from kvpager.errors import InvalidArgumentError

__all__ = [
    "FLAG",
    "NUMBER",
    "TEXT",
    "WHOLE",
    "Kind",
    "check",
    "check_members",
    "instance",
    "optional",
    "shown",
    "tuple_of",
    "wrong_kinds",
]


class Kind(NamedTuple):
    """Values that a setting may have.

    Attributes:
        needed: what they are, for people.
        fits: whether a value is one of them.
    """

    needed: str
    fits: Callable[[object], bool]


def _is_whole(value: object) -> bool:
    return type(value) is int or (not isinstance(value, bool) and hasattr(value, "__index__"))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) or (not isinstance(value, bool) and isinstance(value, Real))


WHOLE = Kind("a whole number", _is_whole)
NUMBER = Kind("a number", _is_number)
FLAG = Kind("True or False", lambda value: isinstance(value, bool | np.bool_))
TEXT = Kind("a text", lambda value: isinstance(value, str))


def optional(kind: Kind) -> Kind:
    """The same, or None."""
    return Kind(f"{kind.needed} or None", lambda value: value is None or kind.fits(value))


def tuple_of(kind: Kind, plural: str) -> Kind:
    """A tuple or a list of such values."""
    return Kind(
        f"a tuple of {plural}", lambda value: isinstance(value, tuple | list) and all(map(kind.fits, value))
    )


def instance(kind: type) -> Kind:
    """Objects of a class."""
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return Kind(f"{article} {kind.__name__}", lambda value: isinstance(value, kind))


def check(name: str, value: object, kind: Kind) -> None:
    """Raises if an argument is of another kind.

    Raises:
        InvalidArgumentError: with the value and what is needed.
    """
    if not kind.fits(value):
        raise InvalidArgumentError(f"{name} is {shown(value)}, {kind.needed} is needed", param=name)


def check_members(name: str, value: object, members: Collection[str]) -> None:
    """Raises if an object does not have what a protocol names.

    Raises:
        InvalidArgumentError: with what it lacks.
    """
    # On the class, so that no property runs; or on the object, where an initialiser sets it.
    lacking = sorted(each for each in members if not hasattr(type(value), each) and not hasattr(value, each))
    if lacking:
        raise InvalidArgumentError(f"the {name} is {shown(value)}, without {', '.join(lacking)}", param=name)


def wrong_kinds(settings: object, kinds: Mapping[str, Kind]) -> list[tuple[str, str]]:
    """Returns (name, what is wrong) of each attribute that is of another kind."""
    values = ((name, getattr(settings, name), kind) for name, kind in kinds.items())
    return [
        (name, f"{name} is {shown(value)}, {kind.needed} is needed")
        for name, value, kind in values
        if not kind.fits(value)
    ]


def shown(value: object) -> str:
    """A value as an error shows it, of any length and whatever its `repr` does."""
    try:
        text = repr(value)
    except Exception:
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
