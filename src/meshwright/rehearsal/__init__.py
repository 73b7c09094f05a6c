"""Rehearsals. In: a function, shapes, a mesh. Out: what the real compiler makes of it.

`api` has the entry points, which run these parts in order; `pipelines` runs them task by task, by
`task_compiler`, which adds up their memory too:

- `request`, `step_arguments`: check the options, decide how the arguments are sharded;
- `lowering`, `callbacks`: trace and lower to StableHLO without devices, callbacks left out;
- `compiler`, `compiler_worker`, `tpu_slices`: compile in a process of its own, or look it up;
- `memory`, `peak` (by `live_ranges`), `host_memory`: the verdict, read off the optimised HLO;
- `result`, `rendering`, `html_sections`: the `Rehearsal`, how it prints, and its page. It reads the
  rest when it is asked: `collectives`, `step_time` (with `repeated_work`), `host_transfers`;
- `advice`: what to do next, by the parts below and `avoidable_costs`;
- `remedies`, `mesh_remedies`, `peak_estimates`, `model_commands`: what would need less memory, how
  much less, and the command for it; `remedy_table` prints that.

Names are looked up on first use: the compiling process needs few of them, and must start fast.
"""

from meshwright._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
