"""Names that are looked up on first use, so that importing what has them costs nothing."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

# A long line is wrapped in brackets.
_LINE = re.compile(r"^from (\S+) import \(?\s*(\w+) as \2\b", re.M)


def attach(
    package: str, file: str, *others: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make a package's `__getattr__`, `__dir__` and `__all__` from the stub beside its `__init__`.

    The stub is where each public name is written, once, as `from meshwright.room.file import Name
    as Name`: type checkers and editors read it there, and so does this. `others` are names that
    the package has of itself.
    """
    # Not by pathlib, nor difflib above: those would be most of the time that the import takes, and
    # before the command line runs Ctrl-C cannot be answered in one line.
    with open(f"{file.rpartition('.')[0]}.pyi", encoding="utf-8") as text:  # noqa: PTH123
        stub = text.read()
    module_of = {name: module for module, name in _LINE.findall(stub)}
    # A room among the names, such as `mw.models`, is listed, but not imported with a star.
    public = sorted([*others, *(name for name, module in module_of.items() if module != package)])

    def lookup(name: str) -> Any:
        if name not in module_of:
            import difflib

            near = difflib.get_close_matches(name, module_of, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")
        if module_of[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return lookup, lambda: sorted({*public, *module_of}), public


def later(module: str, name: str) -> Callable[..., Any]:
    """Return a function that looks up another one when it is called, and calls that.

    So a method can offer what a room below its own does, which imports this one.
    """

    def call(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **options)

    return call
