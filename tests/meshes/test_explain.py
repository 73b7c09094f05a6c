"""`explain(mesh)`: any mesh, a spec, a placement or an abstract mesh, and what is refused."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import meshwright as mw


def test_a_placement_is_explained_as_it_is():
    placed = mw.place("fsdp:4, tp:2", "v5e:4x2")
    assert mw.explain(placed) is placed
    with pytest.raises(mw.errors.MeshError, match="a Placement is explained as it is"):
        mw.explain(placed, intensity={"tp": 3})


def test_an_abstract_mesh_from_elsewhere_needs_hardware():
    mesh = AbstractMesh((3, 5), ("odd", "odder"))
    with pytest.raises(mw.errors.MeshError, match=r"this AbstractMesh has no devices.*on='v5p"):
        mw.explain(mesh)
    assert mw.explain(mesh, on="cpu:15").spec.sizes == (3, 5)


def test_a_spec_needs_hardware():
    with pytest.raises(mw.errors.MeshError, match="'dp:8' has no devices: say on what hardware"):
        mw.explain("dp:8")
    with pytest.raises(mw.errors.MeshError, match="slices goes with a hardware name"):
        mw.explain("dp:8", slices=2)


def test_axis_names_that_are_no_words_are_shown_as_words():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("my axis", 7))
    assert mw.explain(mesh).spec.names == ("my_axis", "7")


def test_an_empty_mesh_is_refused():
    with pytest.raises(mw.errors.MeshError, match="the mesh is empty: it has no devices"):
        mw.explain(Mesh(np.empty((), dtype=object), ()))


def test_an_abstract_mesh_of_ours_is_weighed_anew_when_asked():
    mesh = mw.mesh("fsdp:16, tp:4", on="h100:8x8")
    assert mw.explain(mesh).spec.sizes == (16, 4)
    heavy = mw.explain(mesh, intensity={"fsdp": 1000})
    weights = {axis.name: axis.weight for axis in heavy.axes}
    assert weights["fsdp"] > weights["tp"]
