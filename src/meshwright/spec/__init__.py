"""The request. In: a string, dict, pairs or sizes. Out: a `MeshSpec`, an immutable value.

`mesh_spec` holds the value and fills its open sizes, `parsing` reads what people write. Pure.
"""
