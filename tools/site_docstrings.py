"""Docstrings as the site's reference needs them: `>>>` examples become highlighted blocks."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Put every run of `>>>` lines, with its output, into a fence of its own."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        prompt = line.startswith(">>> ")
        if prompt and not inside:
            lines += ["", "```pycon"]
            inside = True
        if inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line.partition("  # doctest: +")[0] if inside else line)
    return "\n".join([*lines, "```"] if inside else lines)


class FencedExamples(griffe.Extension):
    """Rewrites each docstring once, when its object is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
