"""In: a file. Out: a schedule, checked; and back."""
