"""Planning: a mesh, shardings and constraints for any train step, from its own jaxpr.

In: a function, its arguments or their shapes, and a `Topology`. Out: a `Plan`: the mesh, how every
array is sharded and why, predicted memory and time, and the step with all of it applied.

The parts, in order: the step is traced once (`traced_step`, some of it written otherwise:
`written_forms`) and read (`traced_program`), with a rule for each primitive (`primitive_rules`,
with those of contractions, indexing, shapes and kernels); dims cut together are groups
(`dim_groups`); a plan is, per mesh axis, an ordered list of groups, and has a cost (`plan_costs`,
`exchange_costs`) and needs memory (`stored_values`, `plan_memory`; of one device, `moment_bytes`);
the cheapest lists are searched for on every mesh (`plan_search`). What blocks keep for the backward
pass (`remat_choice`) and stages (`layer_parts`, `stage_costs`, `pipeline_choice`, which makes a
`chosen_pipeline`) are weighed beside that. The step is evaluated with the constraints written in
(`apply_plan`, `planned_step`). `api` is the door, `plan_request` reads what is asked for,
`made_plans` makes what comes out, a `step_plan`, which `plan_text` and `plan_drawing` show,
`plan_rules` writes down and `saved_plans` keeps.

Apart from these, `run_prediction` predicts training runs that are only described
(`described_runs`), by the same speeds.
"""
