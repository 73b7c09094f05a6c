"""Arrays on the move. In: a tree on any meshes, a mesh, specs. Out: the tree on that mesh."""

from meshwright.partitioning.moving.resharding import reshard

__all__ = ["reshard"]
