"""The request. In: a string, dict, pairs or sizes. Out: a `MeshSpec`, an immutable value."""
