"""Arrays in groups. In: arrays or a tree of them. Out: the same in some groups, and back."""

from meshwright.mpmd.arrays.array import MpmdArray
from meshwright.mpmd.arrays.moving import from_groups, to_groups
from meshwright.mpmd.arrays.sharding import MpmdSharding

__all__ = ["MpmdArray", "MpmdSharding", "from_groups", "to_groups"]
