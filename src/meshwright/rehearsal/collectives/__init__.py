"""Every collective of a program: what it moves, over which axes and links, why, from where."""
