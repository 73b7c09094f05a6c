"""`resume`: on from the newest whole checkpoint, on the devices that are here."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import FOUR, assert_same

import meshwright as mw
from meshwright.checkpoints.checkpoint import staging_folder
from meshwright.checkpoints.resume import nearest_spec
from meshwright.errors import CheckpointError, CheckpointWarning, PartitionError, SpecError


def build(key):
    w = jax.random.normal(key, (256, 64))
    return {"w": w, "moments": [jnp.zeros_like(w)], "key": jax.random.key(0), "epoch": 0}


def never_run(key):
    """The same shapes; fails if it is computed."""
    state = build(key)
    shape = jax.ShapeDtypeStruct(state["w"].shape, "float32")
    return {**state, "w": jax.pure_callback(lambda: 1 / 0, shape)}


KEY = jax.random.key(7)


@pytest.fixture
def saved(path):
    """The states of steps 1, 2 and 3, which are saved at `path`."""
    states = {step: {**build(jax.random.key(step)), "epoch": step} for step in (1, 2, 3)}
    with mw.Checkpoints(path) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state)
    return states


def test_without_a_checkpoint_the_state_is_fresh(path):
    step, state, mesh = mw.resume(path, build, KEY, mesh="dp:2, fsdp:-1")
    assert (step, dict(mesh.shape)) == (0, {"dp": 2, "fsdp": 4})
    assert_same(state, mw.init(build, KEY, mesh=mesh))
    assert not path.exists()


def test_the_newest_is_restored_onto_another_mesh_and_nothing_is_computed(path, saved):
    for mesh in ("fsdp:-1, tp:2", FOUR):
        step, state, on = mw.resume(path, never_run, KEY, mesh=mesh)
        assert step == 3
        assert_same(state, saved[3])
        wanted = mw.init(build, KEY, mesh=on)
        assert all(
            one.sharding == other.sharding
            for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True)
            if isinstance(one, jax.Array)
        )
    specs = {"w": ("tp", "fsdp"), "moments": [()], "key": ()}
    specs = jax.tree.map(lambda s: jax.P(*s), specs, is_leaf=lambda s: isinstance(s, tuple))
    state = mw.resume(path, build, KEY, mesh="fsdp:-1, tp:2", specs={**specs, "epoch": None}).state
    assert state["w"].sharding.spec == jax.P("tp", "fsdp")


def damage_data(folder):
    file = max(folder.rglob("d/*"), key=lambda file: file.stat().st_size)
    file.write_bytes(b"")


def damage_values(folder):
    file = max(folder.rglob("d/*"), key=lambda file: file.stat().st_size)
    content = np.frombuffer(file.read_bytes(), np.uint8).copy()
    content[len(content) // 2] ^= 64
    file.write_bytes(content.tobytes())


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damage_data, "a file is damaged or missing"),
        (damage_values, "could not be read|do not fit"),
        (lambda folder: (folder / "meshwright.json").write_text("{"), "checksum file is damaged"),
        (lambda folder: (folder / "meshwright.json").unlink(), "holds no meshwright.json"),
    ],
)
def test_a_damaged_one_is_passed_over_and_said(path, saved, damage, why):
    damage(path / "step_3")
    with pytest.warns(CheckpointWarning, match=rf"(?s)from step 2. Passed over: .*step_3.*({why})"):
        step, state, _ = mw.resume(path, build, KEY, mesh="fsdp:-1")
    assert step == 2
    assert_same(state, saved[2])
    with mw.Checkpoints(path) as checkpoints:  # and replaced when the run comes there again
        checkpoints.save(3, saved[3])
    assert mw.resume(path, build, KEY, mesh="fsdp:-1").step == 3


def test_with_none_whole_there_is_no_silent_beginning(path, saved):
    for step in saved:
        (path / f"step_{step}" / "meshwright.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no checkpoint here is whole.*\n.*step_3.*damaged"):
        mw.resume(path, build, KEY, mesh="fsdp:-1")


def test_a_half_written_one_does_not_count_and_a_swap_cut_short_does(path, saved):
    writing = staging_folder(path / "step_5") / "writing"
    shutil.copytree(path / "step_3", writing)
    assert mw.resume(path, build, KEY, mesh="fsdp:-1").step == 3
    writing.rename(writing.with_name("new"))
    assert mw.resume(path, build, KEY, mesh="fsdp:-1").step == 5


def test_another_tree_is_an_error_and_no_reason_to_go_back(path, saved):
    with pytest.raises(PartitionError, match=r"w: saved as float32\[256,64\], not in the target"):
        mw.resume(path, lambda: {"v": jnp.zeros(3)}, mesh="fsdp:-1")


@pytest.mark.parametrize(
    ("spec", "devices", "nearest"),
    [
        ("dp:4, fsdp:2, tp:2", 8, "dp:2, fsdp:2, tp:2"),
        ("dp:2, tp:8", 8, "dp:1, tp:8"),
        ("fsdp:-1, tp:8", 4, "fsdp:-1, tp:4"),
        ("fsdp:-1, tp:8", 12, "fsdp:-1, tp:4"),
        ("dp:8", 6, "dp:6"),
        ("fsdp:2*8:explicit, tp:4", 32, "fsdp:8:explicit, tp:4"),
        ("a:16, b:16, c:16, d:16, e:16, f:16", 65536, "a:1, b:16, c:16, d:16, e:16, f:1"),
    ],
)
def test_the_nearest_spec_keeps_axes_of_the_model(spec, devices, nearest):
    named = nearest_spec(mw.MeshSpec.parse(spec), devices)
    assert named.resolve(devices, slices=1).size == devices
    if spec[0] != "a":  # of axes without a role any is as near
        assert str(named) == nearest


def test_a_spec_that_no_longer_fits_is_answered_with_one_that_does(path):
    near = "mesh='dp:2, fsdp:8' does not fit the 8 devices that are here. The nearest that does: "
    with pytest.raises(SpecError, match=near + "mesh='dp:1, fsdp:8'") as caught:
        mw.resume(path, build, KEY, mesh="dp:2, fsdp:8")
    assert caught.value.option == "mesh"
    with pytest.raises(PartitionError, match="build is not a function"):
        mw.resume(path, None, mesh="fsdp:-1")


def test_a_path_that_means_another_directory_is_told(path, saved):
    with pytest.raises(PartitionError, match=r"is a checkpoint itself. Name the directory above"):
        mw.resume(path / "step_3", build, KEY, mesh="fsdp:-1")
    (path / "step_3").rename(path / "latest")
    for step in (1, 2):
        shutil.rmtree(path / f"step_{step}")
    with pytest.warns(CheckpointWarning, match="no checkpoint is named step_N. There is latest; "):
        assert mw.resume(path, build, KEY, mesh="fsdp:-1").step == 0
