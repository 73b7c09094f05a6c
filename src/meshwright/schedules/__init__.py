"""Pipeline schedules. In: a name or lists of tasks, and costs. Out: who runs what when.

`types` holds the data: `Schedule`, `Task`, `Costs`. `named` and `auto` build schedules, `files`
reads and writes them. `validation` proves that one runs, `timeline` simulates it and writes traces,
and `text_plot` and `svg_plot` draw the result; `compare` puts all of them side by side.

Pure: no device is touched and JAX is not imported.
"""

from meshwright._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
