"""The vendor's compiler, in a process of its own. In: a program. Out: what it made of it."""
