"""Rehearsals. In: a function, shapes, a mesh. Out: what the real compiler makes of it.

`api` has the entrances and the order of the parts; `pipelines` does the same task by task:

- `request`, `step_arguments`: check what is asked, decide how the arguments are sharded;
- `lowering`: trace and lower to StableHLO without devices;
- `compiler`, `compiler_worker`, `tpu_slices`: compile in a process of its own, or look it up;
- `memory` (by `live_ranges`), `collectives`, `step_time`: read the optimised HLO;
- `result`, `remedies`, `rendering`: the `Rehearsal`, what to do about it, how it prints.

Names are looked up when they are used: the compiling process needs few of them, and soon.
"""

from meshwright._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
