"""The match. In: a `MeshSpec` and a `Topology`. Out: a `Placement`, its cost, and why."""
