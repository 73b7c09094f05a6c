"""The meshes. In: a request and hardware. Out: `jax.sharding.Mesh`es and views of them.

`build` holds `mesh` and `abstract_mesh`, `devices` finds what to build on (live devices, the
vendor compiler's, or none), `views` splits, merges and renames the axes of a mesh.
"""
