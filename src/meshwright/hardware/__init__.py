"""The hardware. In: a name, or JAX devices. Out: a `Topology`: a grid of devices with speeds."""

from meshwright.hardware.chips import CHIPS, Chip
from meshwright.hardware.entrance import topology
from meshwright.hardware.grid import PhysicalAxis, Topology
from meshwright.hardware.subset import compact_part

__all__ = ["CHIPS", "Chip", "PhysicalAxis", "Topology", "compact_part", "topology"]
