"""Groups of devices that run different programs (MPMD), and arrays that live in some of them.

In: a mesh with one axis to cut, or a list of meshes. Out: `groups` (`MpmdMesh`, `MeshGroups`),
`mpmd_sharding` (`MpmdSharding`: which groups hold an array), `arrays` (`MpmdArray`: the array)
and `assign` (`to_groups`, `from_groups`: whole trees into groups and back).
"""
