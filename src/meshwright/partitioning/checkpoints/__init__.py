"""Checkpoints. In: a placed tree and a path. Out: the tree again, on any mesh, verified."""

from meshwright.partitioning.checkpoints.keeping import restore_checkpoint, save_checkpoint

__all__ = ["restore_checkpoint", "save_checkpoint"]
