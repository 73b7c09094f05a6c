"""Measured on this machine: how long a step really takes, laid beside its rehearsal.

- `trace`: run something under JAX's profiler, and read which instruction ran where, and when;
- `step_checks`: what is refused before a step runs, and which mesh it runs on;
- `measure`: run a step under it and join what ran with the program and the model of time;
- `measurement`: what comes out, which prints itself, draws itself and compares;
- `pipeline_steps` and `pipeline_measurement`: the same of a pipeline's step, task by task;
- `calibrate`: measure what the devices do, for rehearsals to go by: `probes` and
  `collective_probes` are the programs, `timing` runs them, `comparison` finds what is slow.
"""
