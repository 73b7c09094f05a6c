"""`Checkpoints`: saved beside the loop, whole, the last ones kept; failures are heard."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import FSDP, assert_same, cut, target_on

import meshwright as mw
from meshwright.checkpoints import async_saves
from meshwright.checkpoints.checkpoint import restore_checkpoint, save_checkpoint
from meshwright.errors import PartitionError


@pytest.fixture
def gate(monkeypatch):
    """The second half of a save waits until this is set."""
    opened, original = threading.Event(), async_saves.shards_checksum

    def wait_first(shards):
        assert opened.wait(60)
        return original(shards)

    monkeypatch.setattr(async_saves, "shards_checksum", wait_first)
    yield opened
    opened.set()


def value(step):
    return {"w": jnp.full((8, 4), step, jnp.float32)}


def block(path, step):
    """Put a file where the finished checkpoint is to be renamed to."""
    (path / f".step_{step}.meshwright" / "new").write_text("")


def names(path):
    return sorted(item.name for item in path.iterdir())


def test_every_so_many_steps_are_saved_and_the_last_kept(path):
    (path / "step_x").mkdir(parents=True)
    save_checkpoint(path / "step_1", value(1))
    (path / "step_1" / "meshwright.json").unlink()  # none of ours any more
    with mw.Checkpoints(path, every=2, keep=2) as checkpoints:
        begun = [checkpoints.save(step, value(step)) for step in range(9)]
        assert checkpoints.save(9, value(9), force=True)
        assert not checkpoints.save(9, value(9), force=True)
    assert begun == [True, False] * 4 + [True]
    assert names(path) == ["step_1", "step_8", "step_9", "step_x"]
    assert repr(checkpoints).endswith("checkpoint: every 2 steps, keep 2>")
    with mw.Checkpoints(path, keep=1) as checkpoints:  # back in time, as after damage
        checkpoints.save(8, value(80))
    assert checkpoints.steps() == [1, 8]
    assert_same(restore_checkpoint(path / "step_8", value(0)), value(80))


def test_what_is_donated_or_changed_during_a_save_is_saved_as_it_was(path, gate):
    on = cut(FSDP, "fsdp")
    noise = np.random.default_rng(0).random((512, 64)).astype(np.float32)
    state = {"w": jax.device_put(noise, on), "host": noise.copy(), "key": jax.random.key(3)}
    step = jax.jit(lambda w: w * 2 + 1, donate_argnums=0)
    with mw.Checkpoints(path) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(3):
            state["w"] = step(state["w"])
        jax.block_until_ready(state["w"])
        state["host"][:] = 0
        assert checkpoints.steps() == []  # still under way
        gate.set()
    back = restore_checkpoint(path / "step_1", target_on(state, on))
    assert_same(back, {"w": noise, "host": noise, "key": jax.random.key(3)})


def test_a_failed_save_is_told_by_the_next_call_and_by_no_other(path, gate, capfd):
    checkpoints = mw.Checkpoints(path)
    gate.set()
    checkpoints.save(1, value(1))
    checkpoints.wait()
    gate.clear()
    checkpoints.save(2, value(2))
    block(path, 2)
    gate.set()
    lost = r"step_2: could not be written. The checkpoints before it are as they were. \(NotADirec"
    with pytest.raises(PartitionError, match=lost):
        checkpoints.save(3, value(3))
    checkpoints.wait()
    assert checkpoints.steps() == [1]
    checkpoints.save(2, value(2))
    with pytest.raises(KeyError) as caught, checkpoints:
        checkpoints.wait()
        gate.clear()
        checkpoints.save(3, value(3))
        block(path, 3)
        gate.set()
        raise KeyError
    assert "step_3: could not be written" in caught.value.__notes__[0]
    assert checkpoints.steps() == [1, 2]
    gate.clear()
    checkpoints.save(4, value(4))
    block(path, 4)
    gate.set()
    checkpoints._thread.join()
    assert "meshwright: " not in capfd.readouterr().err
    del checkpoints
    assert "meshwright: " + str(path / "step_4: could not be wri") in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every: 0 is not a positive integer"),
        ({"keep": 0}, "keep: 0 is not a positive integer"),
        ({"path": "gs://bucket"}, "is not a directory of a file system"),
        ({"path": __file__}, "is a file. Name a directory"),
    ],
)
def test_wrong_options_are_refused(path, options, message):
    with pytest.raises(PartitionError, match=message) as caught:
        mw.Checkpoints(**{"path": path, **options})
    assert caught.value.option == next(iter(options))


def test_a_state_that_cannot_be_saved_is_refused_at_once(path):
    with mw.Checkpoints(path, every=5) as checkpoints:
        with pytest.raises(PartitionError, match=r"save\(5\): 1 problem, nothing was written"):
            checkpoints.save(5, {"f": print})
        with pytest.raises(PartitionError, match="step: -1 is not an integer of at least 0"):
            checkpoints.save(-1, value(1))
    assert checkpoints.steps() == []
