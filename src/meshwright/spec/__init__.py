"""The request. In: a string, dict, pairs or sizes. Out: a `MeshSpec`, an immutable value."""

from meshwright.spec.meshspec import AxisSpec, MeshSpec, SpecLike

__all__ = ["AxisSpec", "MeshSpec", "SpecLike"]
