"""In: a name and sizes. Out: the schedule of that name."""
