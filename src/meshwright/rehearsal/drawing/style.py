"""The one style sheet of every picture here; all its rules are for what lies in `.mw`."""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def style() -> str:
    return resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
