"""What was saved on one mesh comes back on another, bit for bit, or the error says why not."""

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.errors import PartitionError
from meshwright.partitioning import checkpoint_swap as swap
from meshwright.partitioning.checkpoints import restore_checkpoint, save_checkpoint
from meshwright.partitioning.checksums import BLOCK, checksum

WORKER = Path(__file__).with_name("checkpoint_worker.py")
DEADLINE = 120

# Reading damaged files, Orbax drops coroutines that then complain on their way out.
damaged = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Adam(NamedTuple):
    count: Any
    mu: Any
    nu: Any


def mesh(shape, names, devices=None):
    count = int(np.prod(shape))
    return Mesh(np.array((devices or jax.devices())[:count]).reshape(shape), names)


def cut(on, *axes):
    return NamedSharding(on, PartitionSpec(*axes))


FSDP = mesh((8,), ("fsdp",))
DP_TP = mesh((2, 4), ("dp", "tp"))
FOUR = mesh((4,), ("fsdp",))
ONE = mesh((1,), ("fsdp",))


def target_on(tree, sharding):
    """The shapes of a tree, all with one sharding, scalars whole; what is no array stays."""

    def shape(leaf):
        if not hasattr(leaf, "shape"):
            return leaf
        placed = sharding if leaf.shape else whole_on(sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    return jax.tree.map(shape, tree)


def whole_on(sharding):
    return cut(sharding.mesh) if hasattr(sharding, "mesh") else sharding


def bits(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if hasattr(one, "shape"):
            assert (one.shape, one.dtype, bits(one)) == (other.shape, other.dtype, bits(other))
        else:
            assert type(one) is type(other)
            assert repr(one) == repr(other)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


@pytest.fixture
def small(path):
    """A small tree that has been saved at `path`."""
    tree = {"a": {"w": jnp.arange(64.0).reshape(8, 8)}, "b": jnp.ones(8, jnp.bfloat16), "step": 3}
    save_checkpoint(path, tree)
    return tree


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


# From one mesh to another


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
    tree = (
        tree
        if tree != []
        else [jnp.ones((2, 3, 4, 5, 6)), np.float32(2), np.arange(3, dtype="<i4")]
    )
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


# Checksums


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    shape=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=3),
    axes=st.permutations(["dp", "tp", None]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "bool", "complex64"]),
    seed=st.integers(0, 99),
)
def test_a_checksum_does_not_depend_on_the_mesh(shape, axes, dtype, seed):
    values = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
    sizes = {"dp": 2, "tp": 4, None: 1}
    entries = [
        axis if size % sizes[axis] == 0 else None for axis, size in zip(axes, shape, strict=False)
    ]
    assert checksum(jax.device_put(values, cut(DP_TP, *entries))) == checksum(values)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    count=st.integers(1, 40),
    dtype=st.sampled_from(["uint8", "float16", "float32", "float64", "complex64", "complex128"]),
    data=st.data(),
)
def test_one_flipped_bit_always_changes_a_checksum(count, dtype, data):
    values = np.random.default_rng(count).random(count).astype(dtype)
    other = values.copy()
    bit = data.draw(st.integers(0, 8 * values.nbytes - 1))
    other.view(np.uint8)[bit // 8] ^= 1 << bit % 8
    assert checksum(values) != checksum(other)


def test_a_checksum_sees_moved_elements_and_shapes_beyond_a_block():
    values = np.arange(3 * BLOCK, dtype=np.float32)
    swapped = values.copy()
    swapped[[5, 2 * BLOCK]] = swapped[[2 * BLOCK, 5]]
    assert len({checksum(values), checksum(swapped), checksum(values[::-1])}) == 3
    tall = values.reshape(-1, 3)
    placed = jax.device_put(tall, cut(FSDP, "fsdp"))
    assert checksum(tall) == checksum(placed) == checksum(np.asfortranarray(tall))
    wide = values.reshape(1, 3, -1)
    assert checksum(wide) == checksum(jax.device_put(wide, cut(DP_TP, None, None, "tp")))


def test_a_checksum_is_the_same_in_every_version():
    assert checksum(np.arange(6, dtype=np.float32).reshape(2, 3)) == 0x1287092AB56B2F5C


# Damage


def data_file(path):
    return max(path.rglob("d/*"), key=lambda file: file.stat().st_size)


def flip(file, at, bit=6):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


@damaged
def test_a_flipped_bit_in_the_data_is_found_and_the_leaf_named(path):
    noise = np.random.default_rng(0).random((64, 64)).astype(np.float32)
    tree = {"layer": {"w": noise, "b": jnp.ones(4)}}
    target = target_on(tree, cut(FSDP))
    save_checkpoint(path, tree)
    file = data_file(path)
    size, found = file.stat().st_size, 0
    for at in range(0, size, size // 23):
        flip(file, at)
        try:
            back = restore_checkpoint(path, target)
        except PartitionError as error:
            assert "layer/w" in str(error)
            assert "layer/b" not in str(error)
            found += 1
        else:  # the compressor leaves a few bits unused
            assert_same(back["layer"]["w"], jnp.asarray(noise))
        flip(file, at)
    assert found > 20
    assert_same(restore_checkpoint(path, target)["layer"]["w"], jnp.asarray(noise))


def test_damage_that_orbax_does_not_see_is_found_unless_told_not_to_look(path):
    tree = {"a": np.random.default_rng(0).random(4096), "b": jnp.arange(4096.0)}
    tree["a"] = tree["a"].astype(np.float32)
    save_checkpoint(path, tree)
    flip(data_file(path), data_file(path).stat().st_size // 2)
    target = target_on(tree, cut(FSDP, "fsdp"))
    expected = r"checksums of 1 of 2 arrays do not fit.*\n  [ab]: float32\[4096\] has other values"
    with pytest.raises(PartitionError, match=expected):
        restore_checkpoint(path, target)
    wrong = restore_checkpoint(path, target, verify=False)
    assert any(bits(wrong[name]) != bits(tree[name]) for name in tree)


@damaged
@pytest.mark.parametrize("name", ["manifest.ocdbt", "d"])
def test_a_missing_part_is_an_error_of_ours(path, small, name):
    part = path / name
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    with pytest.raises(PartitionError, match=r"could not be read; a file is damaged or missing"):
        restore_checkpoint(path, small)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": 1}', '{"format": 1, "leaves": [], "sha256": "0"}', "\udcff"],
)
def test_a_damaged_checksum_file_is_told_from_damaged_data(path, small, content):
    (path / "meshwright.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(PartitionError, match=r"meshwright.json: the checksum file is damaged"):
        restore_checkpoint(path, small)
    arrays = {"a": small["a"], "b": small["b"]}
    assert_same(restore_checkpoint(path, arrays, verify=False), arrays)


def test_every_changed_character_of_the_checksum_file_is_found(path, small):
    file = path / "meshwright.json"
    good = file.read_text()
    for at in range(0, len(good), 7):
        if good[at].isspace():
            continue
        file.write_text(good[:at] + ("1" if good[at] != "1" else "2") + good[at + 1 :])
        with pytest.raises(PartitionError, match=r"checksum file is damaged|has format"):
            restore_checkpoint(path, small)


def test_a_newer_format_is_refused(path, small):
    (path / "meshwright.json").write_text('{"format": 99, "leaves": []}')
    with pytest.raises(PartitionError, match=r"has format 99, this version reads 1"):
        restore_checkpoint(path, small)


def test_a_missing_checksum_file_is_an_error_with_a_way_out(path, small):
    (path / "meshwright.json").unlink()
    with pytest.raises(PartitionError, match=r"meshwright.json is missing.*verify=False"):
        restore_checkpoint(path, small)
    with pytest.raises(PartitionError, match=r"step: in the target, not in the checkpoint"):
        restore_checkpoint(path, small, verify=False)


# Killed in the middle


def either(place, old, new):
    """Which of two checkpoints is found, whole."""
    back = restore_checkpoint(place, {"w": jnp.zeros((16, 3)), "step": 0})
    assert back["step"] in (old, new)
    assert_same(back["w"], jnp.full((16, 3), back["step"], jnp.float32))
    return back["step"]


def test_killed_at_any_step_the_old_or_the_new_checkpoint_is_whole(tmp_path):
    done = subprocess.run(
        [sys.executable, str(WORKER), "kill", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    killed_before = done.stdout.split()
    assert killed_before.count("rename") >= 3
    assert len(killed_before) > 20
    moments = [tmp_path / str(moment) / "checkpoint" for moment in range(len(killed_before) + 1)]
    found = [either(place, 1, 2) for place in moments]
    assert found == sorted(found)  # once the new one is there, it stays
    assert (found[0], found[-1]) == (1, 2)
    assert not (moments[-1].parent / ".checkpoint.meshwright").exists()
    half_done = [place for place in moments if not place.exists()]
    assert half_done
    for place in half_done:
        with pytest.raises(PartitionError, match="there is a checkpoint already"):
            save_checkpoint(place, {"w": jnp.ones(2)})
    for place in moments:
        save_checkpoint(place, {"w": jnp.full((16, 3), 3.0), "step": 3}, overwrite=True)
        assert either(place, 3, 3) == 3
        assert [item.name for item in place.parent.iterdir()] == ["checkpoint"]


class Killed(BaseException):
    """Stands for SIGKILL: the code under test has nothing that runs after it."""


def write(path, content):
    folder = swap.prepare(path)
    folder.mkdir()
    (folder / "a").write_text(content)
    (folder / "b").write_text(content)
    swap.commit(path)


def killed(monkeypatch, moment, action):
    """Run until the given change to the disk; whether it came to that."""
    count = itertools.count()

    def watched(original):
        def change(*arguments, **options):
            if next(count) == moment:
                raise Killed
            return original(*arguments, **options)

        return change

    with monkeypatch.context() as patch:
        for step in ("mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, step, watched(getattr(os, step)))
        try:
            action()
        except Killed:
            return True
    return False


def test_killed_twice_a_checkpoint_is_still_whole(tmp_path, monkeypatch):
    def content(path):
        place = swap.current(path)
        assert place is not None
        return {(place / name).read_text() for name in ("a", "b")}

    def after_kills(folder, first, second):
        path = folder / "x"
        write(path, "1")
        went_on = killed(monkeypatch, first, lambda: write(path, "2"))
        (before,) = content(path)
        ended = not killed(monkeypatch, second, lambda: write(path, "3"))
        (after,) = content(path)
        assert after == "3" if ended else after in (before, "3")
        write(path, "4")
        assert content(path) == {"4"}
        assert os.listdir(folder) == ["x"]  # noqa: PTH208
        return went_on, ended

    for first in itertools.count():
        for second in itertools.count():
            folder = tmp_path / f"{first}-{second}"
            folder.mkdir()
            went_on, ended = after_kills(folder, first, second)
            if ended:
                break
        if not went_on:
            break
    assert first > 8


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


# Bad input: save


def deleted():
    array = jnp.ones(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "the tree has no leaves"),
        (None, "the tree has no leaves"),
        ({"a": [deleted()]}, r"a/0: has been deleted \(or donated"),
        (
            {"a": jax.ShapeDtypeStruct((3,), "float32")},
            "a: is the shape of an array, without values",
        ),
        ({"f": jnp.sin}, r"f: .* cannot be saved; arrays, bool, int, float and str can"),
        ({"f": 1j}, r"f: 1j cannot be saved"),
        ({"f": np.array(["x"])}, "f: type <U1 cannot be saved"),
        ({"f": np.array([None])}, "f: type object cannot be saved"),
        ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, r"has the same name as"),
        ({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, r"has the same name as"),
        ([jnp.sin, jnp.cos], r"2 problems, nothing was written\.\n  0: .*\n  1: "),
    ],
)
def test_a_tree_that_cannot_be_saved_is_refused(path, tree, message):
    with pytest.raises(PartitionError, match=message):
        save_checkpoint(path, tree)
    assert not path.exists()


def test_tracers_are_refused(path):
    def save(x):
        save_checkpoint(path, {"layer": {"x": x}})
        return x

    for transformed in (jax.jit(save), jax.vmap(save), jax.grad(lambda x: save(x).sum())):
        with pytest.raises(PartitionError, match="layer/x: is traced, it has no values yet"):
            transformed(jnp.ones(3))


def test_an_existing_checkpoint_needs_overwrite(path, small):
    with pytest.raises(PartitionError, match=r"already\. Pass overwrite=True to replace it"):
        save_checkpoint(path, {"w": jnp.ones(2)})
    assert_same(restore_checkpoint(path, small), small)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_directory_is_never_replaced(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(
        PartitionError, match=r"holds 'thesis.tex' but no checkpoint; nothing in it"
    ):
        save_checkpoint(tmp_path, {"w": jnp.ones(2)}, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(PartitionError, match=r"holds 'thesis.tex' but no checkpoint. Name the dir"):
        restore_checkpoint(tmp_path, {"w": jnp.ones(2)})


def test_paths_that_cannot_be_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    tree = {"w": jnp.ones(2)}
    with pytest.raises(PartitionError, match=r"file: is a file\. Name a directory"):
        save_checkpoint(file, tree, overwrite=True)
    with pytest.raises(PartitionError, match=r"file: is a file\. Name the directory of a"):
        restore_checkpoint(file, tree)
    with pytest.raises(PartitionError, match=r"could not be written.*NotADirectoryError"):
        save_checkpoint(file / "below", tree)
    with pytest.raises(PartitionError, match="is the root"):
        save_checkpoint("/", tree)
    with pytest.raises(PartitionError, match="'gs://bucket/x' is not a directory of a file system"):
        save_checkpoint("gs://bucket/x", tree)
    for missing in (tmp_path / "missing", tmp_path / "not" / "there"):
        with pytest.raises(PartitionError, match=r"no checkpoint here\. Save one with"):
            restore_checkpoint(missing, tree)


def test_without_orbax_one_command_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for action in (save_checkpoint, restore_checkpoint):
        with pytest.raises(PartitionError, match=r"Run: pip install orbax-checkpoint$"):
            action(path, {"w": jnp.ones(2)})


def test_importing_the_room_does_not_import_orbax():
    code = (
        "import sys, meshwright, meshwright.partitioning, meshwright.partitioning.checkpoints\n"
        "assert not any(name.split('.')[0] in ('orbax', 'tensorstore') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE)


# Bad input: restore


def shape_like(value, sharding=None, **changes):
    spec = {"shape": value.shape, "dtype": value.dtype, "sharding": sharding, **changes}
    return jax.ShapeDtypeStruct(**spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "b": shape_like(t["b"])}, r"b: has no sharding, .* meshwright.shardings"),
        (lambda t: {**t, "b": np.ones(8, jnp.bfloat16)}, "b: has no sharding"),
        (
            lambda t: {**t, "b": shape_like(t["b"], cut(AbstractMesh((8,), ("x",)), "x"))},
            "b: its sharding is on an AbstractMesh, which has no devices",
        ),
        (
            lambda t: {**t, "b": shape_like(t["b"], cut(mesh((3,), ("x",)), "x"))},
            "b: dim 0 has size 8, not divisible by 3",
        ),
        (
            lambda t: {**t, "b": jnp.ones(9, jnp.bfloat16)},
            r"b: saved as bfloat16\[8\], but the target is bfloat16\[9\]",
        ),
        (
            lambda t: {**t, "b": jnp.ones(8, jnp.float16)},
            r"b: saved as bfloat16\[8\], but the target is float16\[8\]",
        ),
        (lambda t: {**t, "b": 3}, r"b: saved as bfloat16\[8\], but the target holds 3"),
        (
            lambda t: {**t, "step": 3.0},
            r"step: saved as Python int, .* holds 3.0\. Put any int there",
        ),
        (lambda t: {**t, "step": True}, r"step: saved as Python int, .* holds True"),
        (lambda t: {**t, "step": jnp.ones(())}, r"step: saved as Python int, .* is float32\[\]"),
        (lambda t: {"a": t["a"], "step": 1}, r"b: saved as bfloat16\[8\], not in the target"),
        (lambda t: {**t, "c": t["b"]}, "c: in the target, not in the checkpoint"),
        (
            lambda t: {**t, "a": {"W": t["a"]["w"]}},
            r"2 problems, nothing was read(.|\n)*a/w: saved .*\n  a/W: in .* Did you mean 'a/w'\?",
        ),
        (lambda t: {}, "3 problems, nothing was read"),
        (lambda t: {**t, "a": jnp.ones(3)}, r"a/w: saved as .*, not in the target(.|\n)*a: in the"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(path, small, change, message):
    with pytest.raises(PartitionError, match=message):
        restore_checkpoint(path, change(small))


def test_every_difference_is_reported_before_data_is_read(path, small):
    shutil.rmtree(path / "d")
    target = {"a": {"w": jnp.ones(3)}, "b": shape_like(small["b"]), "step": "x"}
    expected = r"3 problems, nothing was read\.\n  a/w: .*\n  b: .*\n  step: "
    with pytest.raises(PartitionError, match=expected):
        restore_checkpoint(path, target)


def test_64_bits_are_not_cut_in_half(path):
    save_checkpoint(path, {"x": np.arange(3) + 2**40})
    target = {"x": jax.ShapeDtypeStruct((3,), np.int64, sharding=cut(ONE))}
    with pytest.raises(PartitionError, match=r"x: type int64 needs 64 bits.*jax_enable_x64"):
        restore_checkpoint(path, target)


def test_a_traced_target_is_refused(path, small):
    with pytest.raises(PartitionError, match="b: has no sharding"):
        jax.jit(lambda b: restore_checkpoint(path, {**small, "b": b}))(small["b"])


# Several processes


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_one(folder, processes):
    """What each of several processes saw."""
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "as_one", *map(str, (folder, port, me, processes))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(processes)
    ]
    end = time.monotonic() + DEADLINE
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, end - time.monotonic()))
        process.kill()  # nothing, where it has ended by itself
    done = [(process.returncode, *process.communicate()) for process in running]
    assert not any(status for status, _, _ in done), [error[-2000:] for _, _, error in done]
    return [json.loads(output.splitlines()[-1]) for _, output, _ in done]


def test_several_processes_save_and_restore_as_one(tmp_path):
    reports = as_one(tmp_path, 2)
    for report in reports:
        assert report["same"] == [True, True]
        assert report["key"] == "key<fry>"
        assert report["step"] == 7
        assert "there is a checkpoint already" in report["exists"]
        assert "w: lives in one process alone" in report["local"]
        assert "float32[64,64], but the target is float32[65,64]" in report["other target"]
        assert report["damaged"] == reports[0]["damaged"]
        assert "w could not be read" in report["damaged"]
    assert {item.name for item in tmp_path.iterdir()} == {"checkpoint", "whole"}
    values = np.sin(np.arange(4096, dtype=np.float32)).reshape(64, 64)
    back = restore_checkpoint(tmp_path / "whole", {"w": jnp.zeros((64, 64))})
    assert_same(back["w"], jnp.asarray(values))
