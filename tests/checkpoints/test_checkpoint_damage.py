"""A flipped bit, a missing file: found, and told apart."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import FSDP, assert_same, bits, cut, target_on

from meshwright.checkpoints.checkpoint import restore_checkpoint, save_checkpoint
from meshwright.errors import PartitionError


def data_file(path):
    return max(path.rglob("d/*"), key=lambda file: file.stat().st_size)


def flip(file, at, bit=6):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


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
