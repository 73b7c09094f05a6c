"""Pipelines. In: a step over groups. Out: what the compiler makes of every group's tasks."""
