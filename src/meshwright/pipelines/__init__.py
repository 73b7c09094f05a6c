"""In: a function with stage marks, groups, a schedule. Out: a step that runs it as a pipeline."""
