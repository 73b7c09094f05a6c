"""What cannot be measured or calibrated: each its own message, and no files are left behind."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import _compat
from meshwright.calibration.trace import record
from meshwright.errors import CalibrationError


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, which must be empty again."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def test_what_a_step_raises_comes_through_with_a_note(temporary):
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        mw.measure(fails, jnp.ones(3))
    words = "The step raised this while measure ran it; nothing was measured."
    assert caught.value.__notes__[-1] == words  # the first is JAX's


def test_a_step_that_fails_under_the_profiler_leaves_none_running(temporary):
    runs = []

    def count(x):
        runs.append(x)
        if len(runs) > 5:  # one to warm up, one more, three rounds of one: under the profiler
            raise ValueError("the data loader broke")
        return x

    def step(x):
        return jax.pure_callback(count, x, x)

    with pytest.raises(Exception, match="the data loader broke"):
        mw.measure(step, jnp.ones(3), steps=1)
    assert mw.measure(jnp.sin, jnp.ones(3), steps=1).seconds > 0


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_step_that_changes_its_arguments_is_told_which():
    def grows(state, x):
        return {"a": state["a"] + 1, "b": jnp.concatenate([state["b"], x])}, x.sum()

    words = r"^state\['b'\]: the step takes float32\[3\] and gives back float32\[7\]\. A loop"
    with pytest.raises(CalibrationError, match=words):
        state = {"a": jnp.ones(2), "b": jnp.ones(3)}
        mw.measure(jax.jit(grows, donate_argnums=0), state, jnp.ones(4))
    # Where none of its arrays can be reused, too.
    with pytest.raises(CalibrationError, match=r"float32\[3\] and gives back int32\[3\]"):
        changes = jax.jit(lambda s: {"a": s["a"].astype("int32")}, donate_argnums=0)
        mw.measure(changes, {"a": jnp.ones(3)})
    # An array that is donated to save memory alone is no state.
    assert mw.measure(jax.jit(jnp.sum, donate_argnums=0), jnp.ones(3), steps=1).seconds > 0


def test_a_trace_without_events_of_the_step(temporary):
    with record() as recording:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))
    with pytest.raises(CalibrationError, match=r"no events of jit_step on any device, only of jit"):
        recording.trace.of("jit_step")
    with record() as recording:
        pass
    with pytest.raises(CalibrationError, match=r"only of no program at all\. Another profiler"):
        recording.trace.of("jit_step")


def test_a_profiler_that_runs_already(temporary, tmp_path):
    with jax.profiler.trace(tmp_path / "mine"):
        with pytest.raises(CalibrationError, match="a profiler is running already"):
            mw.calibrate(quick=True, only=["memory"], progress=False)
    assert list((tmp_path / "mine").rglob("*.xplane.pb"))  # it was not ended by ours


def test_traces_are_removed_unless_they_are_asked_for(temporary, tmp_path):
    mw.measure(jnp.sin, jnp.ones(3), steps=1)
    mw.calibrate(quick=True, only=["functions"], progress=False)
    assert list(temporary.iterdir()) == []
    mw.measure(jnp.sin, jnp.ones(3), steps=1, trace=tmp_path / "kept")
    assert list((tmp_path / "kept").rglob("*.xplane.pb"))


def counted():
    """A step that donates its argument and notes every run, and the list of those."""
    runs = []

    def step(x):
        jax.debug.callback(lambda: runs.append(1))
        return x + 1

    return jax.jit(step, donate_argnums=0), runs


def other_rehearsal():
    return mw.rehearse(jnp.sin, jax.ShapeDtypeStruct((4,), "float32"), mesh="dp:1", on="cpu:1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trace": "/dev/null/here"}, r"^trace: no file can be written to /dev/null/here: Not a"),
        ({"mesh": "dp:8"}, r"^mesh: the step is compiled for 1 device \(number 0\), and the mesh"),
        ({"speeds": "/no/such/file.json"}, r"/no/such/file\.json"),
        ({"rehearsal": other_rehearsal}, r"other arguments: float32\[4\] there, float32\[3\] here"),
    ],
)
def test_what_is_wrong_around_a_step_is_told_before_its_first_run(options, words):
    made = {"mesh": mw.mesh, "rehearsal": lambda make: make()}
    options = {name: made.get(name, str)(value) for name, value in options.items()}
    step, runs = counted()
    x = jnp.ones(3)
    with pytest.raises(CalibrationError, match=words):
        mw.measure(step, x, **options)
    assert not x.is_deleted() and runs == []


def test_a_running_profiler_is_told_before_the_first_run(tmp_path):
    step, runs = counted()
    x = jnp.ones(3)
    assert not _compat.profiler_runs()
    with jax.profiler.trace(tmp_path):
        assert _compat.profiler_runs()
        with pytest.raises(CalibrationError, match="a profiler is running already"):
            mw.measure(step, x)
    assert not x.is_deleted() and runs == []


def test_what_is_no_step_that_can_be_run_is_told():
    x, gone = jnp.ones(3), jnp.ones(3)
    gone.delete()
    jitted = jax.jit(lambda x: x + 1)
    with pytest.raises(CalibrationError, match=r"^x/a: the array has been deleted, mostly because"):
        mw.measure(jitted, {"a": gone})
    with pytest.raises(CalibrationError, match=r"Pass the jitted function that it came from"):
        mw.measure(jitted.lower(x).compile(), x)
    with pytest.raises(CalibrationError, match=r"^step: its program does no work on a device"):
        mw.measure(jax.jit(lambda: None))
    with pytest.raises(CalibrationError, match=r"^trace: 5 is not a folder's name"):
        mw.measure(jitted, x, trace=5)
    with pytest.raises(CalibrationError, match=r"^name: 5 is not a text"):
        mw.measure(jitted, x, name=5)


def test_measuring_where_nothing_is_compiled_or_all_is_traced():
    with jax.disable_jit(), pytest.raises(CalibrationError, match=r"^jax_disable_jit is set"):
        mw.measure(jnp.sin, jnp.ones(3))
    with pytest.raises(CalibrationError, match=r"inside of a function that JAX traces \(jit, grad"):
        jax.jit(lambda x: mw.measure(jnp.sin, x))(jnp.ones(3))
    assert not _compat.is_tracing()


# A file may have 256 bytes, as where a disk is full: the profiler's is larger.
NO_ROOM = """
import resource, sys
import jax, jax.numpy as jnp
import meshwright as mw
x = jnp.ones(3)
folder = sys.argv[1] if len(sys.argv) > 1 else None
mw.measure(jnp.sin, x, steps=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
for call in (
    lambda: mw.measure(jnp.sin, x, steps=1),
    lambda: mw.measure(jnp.sin, x, steps=1, trace=folder),
    lambda: mw.calibrate(quick=True, only=["memory"], progress=False),
):
    try:
        call()
    except mw.errors.CalibrationError as error:
        print(error)
"""


def run_apart(script, *words, **environment):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )


def test_no_room_on_the_disk(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run_apart(NO_ROOM, tmp_path / "kept", TMPDIR=str(temporary), JAX_PLATFORMS="cpu")
    own, kept, calibrated = done.stdout.splitlines()
    for line in (own, calibrated):
        assert line.startswith("the profiler's trace could not be written to ")
        assert "File too large. It takes about 1 MB" in line
        assert line.endswith("make room, or point TMPDIR elsewhere.")
    assert kept.endswith("make room, or name another folder.")
    assert list(temporary.iterdir()) == []


def test_a_process_without_devices():
    script = "import meshwright as mw; mw.calibrate(quick=True)"
    done = run_apart(script, JAX_PLATFORMS="cuda")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert "CalibrationError: there is nothing to calibrate: JAX has no devices here" in last
