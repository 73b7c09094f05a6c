"""What the commands print: plain when piped, coloured on a terminal."""

from __future__ import annotations

import html

from rich.console import Console
from rich.text import Text

from meshwright.hardware import Topology
from meshwright.hardware.show import as_text
from meshwright.placement import Placement
from meshwright.placement.show import drawing

_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan")


def show_topology(topology: Topology) -> None:
    console = _console()
    first, *rest = as_text(topology).splitlines()
    _print(console, Text(first, style="bold"))
    for line in rest:
        _print(console, Text(line))
    chip, chips = topology.chip, topology.num_chips
    if chip.family != "cpu":
        _print(
            console,
            Text(
                f"  {chip.name}: {chip.tflops:,g} TFLOP/s bf16, {chip.memory_gb:g} GB at "
                f"{chip.memory_tbps:g} TB/s a chip; in all {chip.tflops * chips / 1000:,.4g} "
                f"PFLOP/s, {chip.memory_gb * chips / 1000:,.4g} TB"
            ),
        )


def show_placement(placement: Placement) -> None:
    console = _console()
    headline, heading, *rest = str(placement).splitlines()
    _print(console, Text(headline, style="bold"))
    _print(console, Text(heading, style="dim"))
    for line in rest:
        _print(console, Text(line))
    title, *lines = drawing(placement).splitlines()
    _print(console, Text(title, style="dim"))
    for line in lines:
        _print(console, _coloured(line))


def page(title: str, body: str) -> str:
    """A whole page around a value's HTML: works offline, readable on a phone."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title></head>"
        f'<body style="margin:16px">{body}</body></html>\n'
    )


def _coloured(line: str) -> Text:
    text = Text()
    for letter in line:
        style = _COLOURS[ord(letter) % len(_COLOURS)] if letter.strip() else ""
        text.append(letter, style=style)
    return text


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)
