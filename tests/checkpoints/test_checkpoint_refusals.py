"""Trees, targets and paths that cannot be: each is refused, with the place and the fix."""

import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import ONE, assert_same, cut, mesh
from jax.sharding import AbstractMesh, PartitionSpec

from meshwright import _compat
from meshwright.checkpoints.checkpoint import restore_checkpoint, save_checkpoint
from meshwright.errors import MeshwrightError, PartitionError
from meshwright.transfers.device_put import FromCallback


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
        (
            {"f": FromCallback((8,), "int4", lambda index: None)},
            r"f: FromCallback has a shape but is no array\. Save numpy\.asarray\(x\), or place it",
        ),
        ({0: jnp.ones(1), "1": jnp.ones(1)}, r"a dict with keys that have no order, \[0, '1'\]"),
        ({"a\nb" * 99: jnp.sin}, r"a\\nba\\nb.* \.\.\. .*a\\nb: .* cannot be saved"),
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


@pytest.mark.parametrize(
    "path", [3, None, "", " ", b"x", "a\0b", "~nobody_of_this_name/x"], ids=repr
)
def test_what_is_no_path_is_refused(path):
    tree = {"w": jnp.ones(2)}
    for action in (save_checkpoint, restore_checkpoint):
        with pytest.raises(
            PartitionError, match=r"^path .*(is not a directory of|cannot be resolved)"
        ):
            action(path, tree)


def test_a_tilde_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tree = {"w": jnp.ones(2)}
    save_checkpoint("~/runs/step", tree)
    assert (tmp_path / "runs" / "step").is_dir()
    assert_same(restore_checkpoint("~/runs/step", tree), tree)


def test_options_are_true_or_false(path, small):
    with pytest.raises(MeshwrightError, match=r"^overwrite: 'yes' is not True or False\.$"):
        save_checkpoint(path, small, overwrite="yes")
    with pytest.raises(MeshwrightError, match=r"^verify: 'no' is not True or False\.$"):
        restore_checkpoint(path, small, verify="no")


def test_without_orbax_one_command_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for action in (save_checkpoint, restore_checkpoint):
        with pytest.raises(PartitionError, match=r"Run: pip install orbax-checkpoint$"):
            action(path, {"w": jnp.ones(2)})


def test_importing_the_room_does_not_import_orbax():
    code = (
        "import sys, meshwright, meshwright.checkpoints.checkpoint\n"
        "assert not any(name.split('.')[0] in ('orbax', 'tensorstore') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


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
            lambda t: {**t, "b": shape_like(t["b"], cut(ONE, PartitionSpec.UNCONSTRAINED))},
            "b: .* leaves a dim unconstrained",
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


def test_devices_of_the_compiler_are_refused(path, small, monkeypatch):
    monkeypatch.setattr(_compat, "is_compile_only", lambda device: True)
    with pytest.raises(PartitionError, match="b: its devices exist for the compiler only"):
        restore_checkpoint(path, small)


def test_64_bits_are_not_cut_in_half(path):
    save_checkpoint(path, {"x": np.arange(3) + 2**40})
    target = {"x": jax.ShapeDtypeStruct((3,), np.int64, sharding=cut(ONE))}
    with pytest.raises(PartitionError, match=r"x: type int64 needs 64 bits.*jax_enable_x64"):
        restore_checkpoint(path, target)


def test_a_target_that_jax_narrowed_names_the_switch(path):
    save_checkpoint(path, {"x": np.arange(3) + 2**40})
    with pytest.raises(
        PartitionError,
        match=r"x: saved as int64\[3\], but the target is int32\[3\]\. JAX narrowed the target: "
        r"call jax\.config\.update\('jax_enable_x64', True\)",
    ):
        restore_checkpoint(path, {"x": jnp.arange(3)})


def test_a_traced_target_is_refused(path, small):
    with pytest.raises(PartitionError, match="b: has no sharding"):
        jax.jit(lambda b: restore_checkpoint(path, {**small, "b": b}))(small["b"])
