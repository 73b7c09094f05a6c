"""Checkpoints. In: a placed tree and a path. Out: the tree again, on any mesh, verified."""
