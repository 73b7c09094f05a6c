"""In: a timeline. Out: a picture of it for the terminal, a page, or a trace viewer."""
