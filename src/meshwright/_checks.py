"""Checks of arguments that all rooms share: names, counts, flags, seconds, lists.

Each returns the argument in its plain form, or raises an error that names it and what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.errors import MeshwrightError, RehearsalError, ScheduleError, SpecError, near, short

LARGEST = 2**31 - 1
MOST_AXES = 32  # what an array may have
RESERVED = ":=,*"
TYPE_WORDS = ("auto", "explicit", "manual")


def _option(what: str) -> str | None:
    """Return the option that a message begins with: `groups` of `"gpipe: groups"`.

    >>> _option("gpipe: groups"), _option("stages[2]")
    ('groups', None)
    """
    word = what.rpartition(" ")[2]
    return word if word.isidentifier() else None


def check_name(name: object) -> str:
    """Return an axis name that prints, and that the text of a `MeshSpec` can hold."""
    if not isinstance(name, str):
        raise SpecError(f"axis name {short(name)} is a {type(name).__name__}, not a string.")
    if not name:
        raise SpecError("an axis name is empty. Give every axis a name, e.g. 'dp'.")
    if len(name) > 100:
        raise SpecError(f"axis name {short(name)} has {len(name)} characters; at most 100.")
    if not name.isprintable() or any(c.isspace() or c in RESERVED for c in name):
        raise SpecError(
            f"axis name {short(name)} has a character that does not print, a space, or one of "
            f"{' '.join(RESERVED)}. Use letters, digits and _ , e.g. 'dp' or 'my_axis'."
        )
    return name


def check_size(name: str, size: object) -> int:
    """Return the size of an axis: a positive integer, or -1 for the devices that are left."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise SpecError(
            f"axis {name!r}: size {short(size)} is a {type(size).__name__}, not an integer. "
            "Use a positive integer, or -1 for what is left."
        )
    value = int(size)
    if value == 0 or value < -1:
        raise SpecError(
            f"axis {name!r}: size {short(value)} is not allowed. "
            "Use a positive integer, or -1 for what is left."
        )
    if value > LARGEST:
        raise SpecError(f"axis {name!r}: size {short(value)} is more than {LARGEST}.")
    return value


def check_integer(
    what: str,
    value: object,
    *,
    least: int = 1,
    most: int = LARGEST,
    error: type[MeshwrightError] = SpecError,
) -> int:
    """Return a count or an index as an `int`: an integer (no boolean) from `least` to `most`.

    >>> check_integer("slices", 0)
    Traceback (most recent call last):
    ...
    meshwright.errors.SpecError: slices: 0 is not a positive integer.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise error(f"{what}: {short(value)} is not {wanted}.", option=_option(what))
    if int(value) > most:
        raise error(f"{what}: {short(value)} is more than {most}.", option=_option(what))
    return int(value)


def is_single_slice(slices: object) -> bool:
    """Whether `slices` was left at its default; 1.0 and True equal it too, but are mistakes."""
    whole = isinstance(slices, numbers.Integral) and not isinstance(slices, bool)
    return whole and slices == 1


def check_flag(what: str, value: object, *, error: type[MeshwrightError] = SpecError) -> bool:
    """Return a boolean; refuse 0, 1 or 'yes'."""
    # NumPy's own booleans by their name: what checks its arguments need not load NumPy.
    if not isinstance(value, bool) and f"{type(value).__module__}.{type(value).__name__}" not in (
        "numpy.bool",
        "numpy.bool_",
    ):
        raise error(f"{what}: {short(value)} is not True or False.", option=_option(what))
    return bool(value)


def check_list(what: str, value: Any) -> list[Any]:
    """Return a list of things that have an order; a string, a dict or a set is refused."""
    if not isinstance(value, (str, bytes, Mapping, set, frozenset)):
        try:
            return list(value)
        except TypeError:  # no iteration, or an array without dimensions
            pass
    raise SpecError(f"{what}: {short(value)} is not a list or tuple.", option=_option(what))


def check_type(name: str, value: object) -> str | None:
    """Return an axis type as a word, from `None`, a word or a `jax.sharding.AxisType`."""
    if value is None:
        return None
    word: Any = value if isinstance(value, str) else getattr(value, "name", None)
    if isinstance(word, str) and word.lower() in TYPE_WORDS:
        return word.lower()
    hint = near(word.lower(), TYPE_WORDS) if isinstance(word, str) else ""
    raise SpecError(
        f"axis {name!r}: type {short(value)} is not an AxisType or one of "
        f"{', '.join(TYPE_WORDS)}.{hint}"
    )


def check_distinct(names: Sequence[str]) -> None:
    """Refuse an axis that is named twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"axis {name!r} appears twice. Give every axis a name of its own.")
        seen.add(name)


def check_time(value: Any, what: str) -> float:
    """Return a time: a finite, non-negative number."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        number = math.nan
    else:
        number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ScheduleError(
            f"{what}: a time is a number from 0, not {short(value)}.", option=_option(what)
        )
    return number


def check_seconds(what: str, value: object, *, error: type[MeshwrightError]) -> float:
    """Return a timeout: a number of seconds above 0; `math.inf` waits for ever."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise error(
            f"{what}: {short(value)} is not a number of seconds above 0.", option=_option(what)
        )
    return float(value)


def argument_numbers(what: str, numbers: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return the positions of arguments, from one or several, as `jax.jit` takes them."""
    if not isinstance(numbers, (int, tuple, list)):
        raise RehearsalError(
            f"{what}: expected an int or a sequence of ints, got {short(numbers)}."
        )
    several = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    for number in several:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
            raise RehearsalError(
                f"{what}: {short(number)} is no argument; they are counted from 0 to {count - 1}."
            )
    return several


@dataclasses.dataclass(frozen=True)
class JsonFields:
    """One object of a file that others may have written: its fields as what they should be.

    Raises `ValueError` that says where which field is wrong. Numbers are finite, texts short and
    printable, lists and objects what they are.

    >>> JsonFields({"members": -1}, "figure 3").count("members", 2)
    Traceback (most recent call last):
    ValueError: figure 3: members is -1, not an integer from 2 to 4194304
    """

    data: Mapping[str, Any]
    where: str

    def wrong(self, name: str, value: object, words: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {short(value)}, not {words}")

    def get(self, name: str) -> Any:
        if name not in self.data:
            raise ValueError(f"{self.where}: there is no {name!r}")
        return self.data[name]

    def text(self, name: str) -> str:
        return self.as_text(name, self.get(name))

    def as_text(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > 1000:
            raise self.wrong(name, value, "a text of at most 1,000 characters")
        if value.isprintable():
            return value
        return "".join(each if each.isprintable() else "?" for each in value)

    def number(self, name: str, least: float = 0.0) -> float:
        return self.as_number(name, self.get(name), least)

    def as_number(self, name: str, value: Any, least: float = 0.0) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= 1e25:
            raise self.wrong(name, value, f"a number from {least:g} to 1e25")
        return float(value)

    def numbers(self, name: str, least: float = 0.0) -> tuple[float, ...]:
        return tuple(self.as_number(name, value, least) for value in self.list_of(name))

    def count(self, name: str, least: int) -> int:
        return self.as_count(name, self.get(name), least)

    def as_count(self, name: str, value: Any, least: int) -> int:
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if not is_count or not least <= value <= 2**22:
            raise self.wrong(name, value, f"an integer from {least} to {2**22}")
        return int(value)

    def list_of(self, name: str) -> list[Any]:
        if not isinstance(value := self.get(name), list):
            raise self.wrong(name, value, "a list")
        return value

    def object_of(self, name: str) -> dict[str, Any]:
        if not isinstance(value := self.get(name), dict):
            raise self.wrong(name, value, "an object")
        return value

    def rows(self, name: str) -> Iterator[JsonFields]:
        for number, row in enumerate(self.list_of(name)):
            if not isinstance(row, dict):
                raise self.wrong(f"{name} {number}", row, "an object")
            yield JsonFields(row, f"{name} {number}")
