"""The contract: interfaces of four older libraries, kept exactly, on top of the rooms above.

`mesh_creation` has `create_mesh` and its kin and `DeviceMeshManager`, `partition_helper` has
`MeshPartitionHelper`. They check and translate; nothing in the package imports them.
"""
