"""Run an ordinary function as a pipeline over groups of devices.

In: a function with stage ends (`trace_marks.py`) around a loss that `value_and_grad`
(`microbatching.py`) differentiates, groups of devices, a schedule. Out: a `PipelineStep`
(`step.py`) that is called like the function. `api.py` and `arguments.py` check the options;
`arguments.py` puts the arguments of a call in order. While a step is traced, the part that runs
once per microbatch is a `Region` (`trace_marks.py`), with how its results are reduced.

The first call with arguments of a kind makes a plan, which `plan_cache.py` keeps. `plan.py` runs
seven passes, then compiles:

1. `tracing.py`: trace the step, inline `jit` and what else hides stage ends, find the region of
   microbatches.
2. `stages.py`: inline remats, assign every equation of the region to a stage, forward or backward.
   The equations and their stages are a `StagedProgram` (`staged_program.py`).
3. `staged_program.py`: give every result and carried value a stage, and split gradients into one
   part per stage.
4. `task_programs.py`: the equations of each task of the schedule: its inputs, its outputs, and what
   it adds up over microbatches.
5. `task_programs.py`: rewrite meshes and shardings in equations to the group that runs them. Passes
   6 and 7 call it for every program they make.
6. `build_tasks.py`: tasks, slices of the batch, accumulators and transfers as operations on slots.
7. `build_step.py`: what runs before and after the tasks (casts, the optimizer) as operations too;
   pass 6 runs between the two. `outer_program.py` decides which group runs each equation.

Passes 6 and 7 write into a `StepBuilder` (`step_graph.py`), which holds slots, operations and where
values lie. A call then binds its arguments to slots and executes the operations of this process
(`runtime.py`). In several processes the plans are compared before the first step
(`consistency.py`). `explanation.py`, `profiling.py` and `lowered.py` are `step.explain()`,
`step.timeline()` and `step.lower()`.
"""
