"""The colours of a drawing: a hue per kind of task, a shade per stage of a group."""

from __future__ import annotations

NAMES = {
    "F": "forward",
    "B": "gradient of the input",
    "W": "gradient of the weights",
    "BW": "whole backward",
}
# Apart in lightness as well as in hue, so that no kind is told by red against green alone.
_HUES = {"F": "#3b6fc4", "B": "#f0a630", "W": "#2f9e7a", "BW": "#bf4636"}
# Of black and white one always has a contrast of at least 4.5, as small print needs.
_DARK, _LIGHT = "#000000", "#ffffff"
_PALEST = 0.55

# A picture brings its own background, so it reads the same on any page.
STYLE = """\
.mw-schedule{font-family:ui-sans-serif,system-ui,"Segoe UI",Roboto,sans-serif;font-size:11px}
.mw-schedule text{fill:#5b6675;font-variant-numeric:tabular-nums}
.mw-schedule .page{fill:#ffffff}
.mw-schedule .lane{fill:#e8ecf2}
.mw-schedule .line{stroke:#d9dfe8;stroke-width:1}
.mw-schedule .strong{fill:#16202e}
.mw-schedule .pair{fill:none;stroke:#16202e;stroke-width:1.5}
@media (prefers-color-scheme:dark){
.mw-schedule text{fill:#9aa6b6}
.mw-schedule .page{fill:#151a21}
.mw-schedule .lane{fill:#29313c}
.mw-schedule .line{stroke:#2c343f}
.mw-schedule .strong{fill:#eef2f7}
.mw-schedule .pair{stroke:#ffffff}
}
"""


def fill(kind: str, number: int = 0, stages: int = 1) -> str:
    """The colour of a task of the group's `number`-th stage: the first full, later ones paler.

    >>> fill("F"), fill("F", 1, 2)
    ('#3b6fc4', '#a7bee4')
    """
    share = _PALEST * number / max(1, stages - 1)
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in _parts(_HUES[kind]))


def ink(colour: str) -> str:
    """The text colour that stands out best on a fill.

    >>> ink("#3b6fc4"), ink("#f0a630")
    ('#ffffff', '#000000')
    """
    return max(_DARK, _LIGHT, key=lambda text: contrast(text, colour))


def contrast(one: str, other: str) -> float:
    """How far apart two colours are in lightness, from 1 to 21, as WCAG counts it.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    linear = [
        c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _parts(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _parts(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
