"""What was saved on one mesh comes back on another, bit for bit."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import DP_TP, FOUR, FSDP, ONE, assert_same, cut, target_on, whole_on
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshwright.checkpoints.checkpoint import restore_checkpoint, save_checkpoint
from meshwright.checkpoints.manifest import Entry
from meshwright.errors import PartitionError


class Adam(NamedTuple):
    count: Any
    mu: Any
    nu: Any


def training_state():
    key = jax.random.key(0)
    rows = cut(FSDP, "fsdp")
    weights = {
        "mlp/~/linear.0": jax.device_put(jax.random.normal(key, (16, 24)), rows),
        "bias": jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), rows),
    }
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return {
        "params": weights,
        "opt": (Adam(jnp.array(3, jnp.int32), weights, zeros), None, [{}]),
        "keys": jax.device_put(jax.random.split(key, 8), rows),
    }


@pytest.mark.parametrize(
    "sharding",
    [
        cut(FSDP, "fsdp"),
        cut(DP_TP, ("tp", "dp")),
        cut(DP_TP, "tp"),
        cut(DP_TP),
        cut(FOUR, "fsdp"),
        cut(ONE),
        jax.sharding.SingleDeviceSharding(jax.devices()[5]),
        cut(Mesh(DP_TP.devices, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2), "dp"),
    ],
    ids=lambda sharding: f"{getattr(sharding, 'mesh', '')}{getattr(sharding, 'spec', 'device')}",
)
def test_a_training_state_comes_back_on_another_mesh(path, sharding):
    state = training_state()
    save_checkpoint(path, state)
    back = restore_checkpoint(path, target_on(state, sharding))
    assert_same(back, state)
    assert back["params"]["bias"].sharding == sharding
    assert back["keys"].sharding.is_equivalent_to(sharding, 1)
    assert back["opt"][0].count.sharding == whole_on(sharding)


def test_dims_are_cut_differently(path):
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), cut(DP_TP, "dp", "tp"))
    save_checkpoint(path, [array])
    for axes in [("tp", "dp"), (None, ("dp", "tp")), (("tp", "dp"),), ("dp",)]:
        (back,) = restore_checkpoint(path, target_on([array], cut(DP_TP, *axes)))
        assert_same(back, array)
        assert back.sharding.spec == PartitionSpec(*axes)


def test_placed_arrays_are_a_target_even_when_donated(path):
    array = jax.device_put(jnp.arange(8.0), cut(FSDP, "fsdp"))
    save_checkpoint(path, {"w": array})
    used = jnp.zeros_like(array)
    used.delete()
    assert_same(restore_checkpoint(path, {"w": used})["w"], array)


@pytest.mark.parametrize(
    "dtype",
    "bool int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 float16 float32 bfloat16 "
    "complex64 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn".split(),
)
@pytest.mark.parametrize("on_host", [False, True])
def test_every_type_keeps_its_bits(path, dtype, on_host):
    values = (np.arange(16) % 4).astype(dtype)
    if values.dtype.kind != "b" and "int" not in dtype and dtype not in ("complex64",):
        values[:2] = np.array([-0.0, np.nan]).astype(dtype)
    if dtype == "float32":  # a NaN with a message, which arithmetic would not keep
        values.view(np.uint32)[1] = 0x7FC12345
    array = values if on_host else jax.device_put(values, cut(FSDP, "fsdp"))
    save_checkpoint(path, {"x": array})
    for verify in (True, False):
        target = target_on({"x": array}, cut(DP_TP, "tp"))
        assert_same(restore_checkpoint(path, target, verify=verify)["x"], jnp.asarray(values))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("shape", [(), (8,), (8, 2), (0,)])
def test_keys_come_back_as_keys_of_their_kind(path, impl, shape):
    keys = jax.random.split(jax.random.key(7, impl=impl), 16)[: int(np.prod(shape))].reshape(shape)
    save_checkpoint(path, keys)
    sharding = cut(FSDP, *["fsdp"][: len(shape)])
    back = restore_checkpoint(path, target_on(keys, sharding))
    assert back.dtype == keys.dtype
    assert back.sharding.is_equivalent_to(sharding, len(shape))
    assert_same(back, keys)


@pytest.mark.parametrize(
    "value", [0, -1, 10**30, True, False, 0.1, -0.0, float("nan"), float("inf"), 5e-324, "", "ü\n'"]
)
def test_python_values_come_back_exactly(path, value):
    save_checkpoint(path, {"x": jnp.ones(2), "value": value})
    target = {"x": jnp.zeros(2), "value": type(value)()}
    assert_same(restore_checkpoint(path, target)["value"], value)


@pytest.mark.parametrize(
    "tree",
    [
        jnp.arange(3.0),
        [jnp.ones((2, 3, 4, 5, 6)), np.float32(2), np.arange(3, dtype=np.int32)],
        {"": jnp.ones(2), "a.b": jnp.zeros(2), "c/d": [jnp.ones(())]},
        {0: jnp.ones(1), 5: (jnp.zeros((2, 0, 3)), None)},
        {"only": jnp.zeros((0, 8), jnp.int8)},
        {"step": 3},
        {"é ☃": jnp.ones(1), "a" * 200: jnp.ones(1)},
        7,
    ],
    ids=repr,
)
def test_odd_trees_come_back(path, tree):
    save_checkpoint(path, tree)
    back = restore_checkpoint(path, target_on(tree, cut(FSDP)))
    assert_same(back, jax.tree.map(lambda x: jnp.asarray(x) if hasattr(x, "shape") else x, tree))


def test_any_reader_of_orbax_reads_the_arrays(path, small):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        target = target_on({"a": small["a"], "b": small["b"]}, cut(FSDP, "fsdp"))
        assert_same(checkpointer.restore(path, target), {"a": small["a"], "b": small["b"]})


def test_what_orbax_wrote_is_read_unverified(path):
    import orbax.checkpoint as ocp

    tree = {"a": [jnp.arange(8.0), {"b": jnp.ones(3, jnp.int32)}]}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    with pytest.raises(PartitionError, match=r"meshwright.json is missing.*verify=False"):
        restore_checkpoint(path, tree)
    assert_same(restore_checkpoint(path, tree, verify=False), tree)
    with pytest.raises(
        PartitionError, match=r"a/0: stored as float32\[8\], but .* is float32\[4\]"
    ):
        other = {"a": [jnp.zeros(4), tree["a"][1]]}
        restore_checkpoint(path, other, verify=False)


def test_a_failed_save_keeps_the_checkpoint_before_and_leaves_no_litter(path, small, monkeypatch):
    def full(self, *arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(
        PartitionError, match=r"could not be written\. A .* still is.*No space left"
    ):
        save_checkpoint(path, {"w": jnp.ones(2)}, overwrite=True)
    monkeypatch.undo()
    assert_same(restore_checkpoint(path, small), small)
    assert [item.name for item in path.parent.iterdir()] == ["checkpoint"]


def test_an_overwritten_checkpoint_has_the_new_tree(path, small):
    for step in range(3):
        save_checkpoint(path, {"other": jnp.full(3, step)}, overwrite=True)
        assert_same(
            restore_checkpoint(path, {"other": jnp.zeros(3, int)})["other"], jnp.full(3, step)
        )


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path, small, path):
    link = tmp_path / "latest"
    link.symlink_to(path)
    save_checkpoint(link, {"w": jnp.ones(2)}, overwrite=True)
    assert link.is_symlink()
    assert_same(restore_checkpoint(path, {"w": jnp.zeros(2)})["w"], jnp.ones(2))


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path):
    for place in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        if place.name == "empty":
            place.mkdir()
        save_checkpoint(str(place), {"w": jnp.ones(2)})
        assert_same(restore_checkpoint(str(place), {"w": jnp.zeros(2)})["w"], jnp.ones(2))


def test_numbers_in_the_other_byte_order_come_back_as_they_read(tmp_path):
    values = np.arange(8, dtype=">i4")
    save_checkpoint(tmp_path / "c", {"x": values})
    restored = restore_checkpoint(tmp_path / "c", {"x": jnp.zeros(8, jnp.int32)})
    np.testing.assert_array_equal(restored["x"], values)


def test_keys_that_do_not_print_come_back(tmp_path):
    tree = {"two\nlines": jnp.arange(8), "two\\nlines": jnp.ones(8)}
    save_checkpoint(tmp_path / "c", tree)
    assert_same(restore_checkpoint(tmp_path / "c", tree), tree)


def test_the_repr_of_an_entry_stays_short():
    assert repr(Entry(("a", "w"), "float32", (8, 2), "0" * 16)) == "<Entry a/w: float32[8,2]>"
    long = Entry(("a" * 500,) * 9, "float32", (8,) * 90, "0" * 16)
    text = Entry(("step",), "str", text="x" * 100_000)
    assert max(len(repr(long)), len(repr(text))) <= 200
