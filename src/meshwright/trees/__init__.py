"""Pytrees of arrays. In: any pytree. Out: leaves with their paths, and checked specs. No devices.

`walk` flattens a tree into leaves with paths; `specs` checks `PartitionSpec`s against arrays and a
mesh; `split` separates the arrays of a tree from its static leaves.
"""
