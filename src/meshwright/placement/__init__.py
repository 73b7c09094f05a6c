"""Placements. In: a `MeshSpec` and a `Topology`. Out: a `Placement`, its cost, and why.

`placer` holds `place`, which searches (`search`) under a stated model (`cost_model`), and
`measure`, which costs a mesh that exists; `placement` is the result and how it shows itself.
"""
