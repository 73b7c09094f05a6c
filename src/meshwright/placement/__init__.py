"""The match. In: a `MeshSpec` and a `Topology`. Out: a `Placement`, its cost, and why."""

from meshwright.placement.measure import measure
from meshwright.placement.placing import place
from meshwright.placement.plan import AxisPlan, Placement

__all__ = ["AxisPlan", "Placement", "measure", "place"]
