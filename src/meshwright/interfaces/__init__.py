"""The calls of other mesh libraries. In: their arguments. Out: this library's meshes and specs."""
