"""The compiling process: its timeout, its crashes, its environment; and the outcomes kept."""

import contextlib
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import RehearsalError
from meshwright.rehearsal import compiler

SHAPE = jax.ShapeDtypeStruct((64, 64), "float32")


def rehearsed(cache, function=lambda w: w @ w, **options):
    options = {"mesh": "fsdp:8", "on": "cpu:8", **options}
    return mw.rehearse(function, SHAPE, cache=cache, **options)


def slow_to_compile(w):
    for _ in range(600):
        w = jnp.sort(jnp.tanh(w @ w), axis=0)
    return w


def test_the_second_time_is_from_the_cache_and_says_the_same(tmp_path):
    first, second = rehearsed(tmp_path), rehearsed(tmp_path)
    assert not first.from_cache
    assert second.from_cache
    assert second.text == first.text
    assert second.memory == first.memory
    assert "(8 devices), cached, compiled by jaxlib" in str(second)


def test_the_cache_tells_programs_shardings_hardware_and_flags_apart(tmp_path, monkeypatch):
    rehearsed(tmp_path)
    other = jax.sharding.PartitionSpec(None, "fsdp")
    assert not rehearsed(tmp_path, lambda w: w @ w + 1).from_cache
    assert not rehearsed(tmp_path, in_shardings=[other]).from_cache
    assert not rehearsed(tmp_path, mesh="fsdp:4", on="cpu:4").from_cache
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert not rehearsed(tmp_path).from_cache
    monkeypatch.delenv("XLA_FLAGS")
    assert rehearsed(tmp_path).from_cache


@pytest.mark.parametrize("content", [b"", b"damaged", None])
def test_a_damaged_entry_is_ignored_and_written_anew(tmp_path, content):
    first = rehearsed(tmp_path)
    (entry,) = tmp_path.glob("*.rehearsal")
    whole = entry.read_bytes()
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 1
    entry.write_bytes(bytes(flipped) if content is None else content)
    again = rehearsed(tmp_path)
    assert not again.from_cache
    assert again.memory == first.memory
    assert rehearsed(tmp_path).from_cache


def test_a_home_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert rehearsed(True).fits
    assert blocked.read_text() == "in the way"


def test_nothing_is_kept_where_it_is_not_wanted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rehearsed(False).fits
    assert list(tmp_path.iterdir()) == []
    assert rehearsed(True).fits
    assert len(list((tmp_path / "meshwright").glob("*.rehearsal"))) == 1


def test_a_full_cache_drops_what_was_not_used_for_longest(tmp_path, monkeypatch):
    site = compiler.Site("cpu", mw.topology("cpu:8"), np.arange(8))
    first, second, third, fourth = (
        compiler.Job("step", code, site, ()) for code in (b"a", b"b", b"c", b"d")
    )
    for used, job in enumerate((first, second, third)):
        compiler.save(tmp_path, job, compiler.Outcome("compiled", seconds=4.0))
        os.utime(tmp_path / f"{job.key}.rehearsal", (used, used))
    assert compiler.load(tmp_path, first) is not None  # and so used now
    sizes = [stat.st_size for _, stat in compiler.cached(tmp_path)]
    monkeypatch.setattr(compiler, "MOST_BYTES", sum(sizes) + min(sizes) // 2)
    compiler.save(tmp_path, fourth, compiler.Outcome("compiled", seconds=70.0))
    kept = [compiler.load(tmp_path, job) is not None for job in (first, second, third, fourth)]
    assert kept == [True, False, True, True]
    # What the last compile of that name on that hardware took is what to expect of the next.
    assert compiler.last_seconds(tmp_path, compiler.Job("step", b"e", site, ())) == 70.0
    assert compiler.last_seconds(tmp_path, compiler.Job("other", b"e", site, ())) is None
    compiler.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def compiling():
    """The compiling processes that run under this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = folder.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1]
            words = folder.joinpath("cmdline").read_text()
            if int(parent) == os.getpid() and "rehearsal.compiler_worker" in words:
                found.append(words)
    return found


def test_a_compile_that_outlives_its_timeout_is_ended(tmp_path):
    began = time.monotonic()
    with pytest.raises(RehearsalError, match=r"not done after 1\.5 s and was ended.*timeout="):
        rehearsed(tmp_path, slow_to_compile, timeout=1.5)
    assert time.monotonic() - began < 60
    assert compiling() == []
    assert list(tmp_path.iterdir()) == []
    assert rehearsed(tmp_path).fits  # the caller goes on


def test_a_crash_is_told_with_what_was_written_last(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag_at_all=1")
    with pytest.raises(RehearsalError, match="compiling process crashed") as caught:
        rehearsed(tmp_path)
    assert "xla_no_such_flag_at_all" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 20
    monkeypatch.delenv("XLA_FLAGS")
    assert rehearsed(tmp_path).fits


def test_the_simulated_devices_of_this_process_are_not_the_compilers(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_dump_hlo=x")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    found = compiler.environment()
    assert found["XLA_FLAGS"] == "--xla_dump_hlo=x"
    assert found["JAX_PLATFORMS"] == "cpu"


def test_the_compiling_process_ends_with_its_parent_and_leaves_nothing(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, meshwright as mw\n"
        "from meshwright.meshes.build import placement_of\n"
        "from meshwright.rehearsal.compiler import Site\n"
        "from meshwright.rehearsal.compiler import Compiler\n"
        "hardware = mw.topology('cpu:8')\n"
        "placed = placement_of(mw.MeshSpec.parse('dp:8'), hardware)\n"
        "compiler = Compiler(Site('cpu', hardware, placed.positions))\n"
        "print(compiler._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60
    while _alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(pid)
    assert list(folder.iterdir()) == []
    parent.stdin.close()
    parent.stdout.close()


def _alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_default_folder_is_the_users_own(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(compiler.default_folder()) == "/somewhere/meshwright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebodys/home")
    assert str(compiler.default_folder()) == "/somebodys/home/.cache/meshwright"


def test_another_line_that_calls_is_the_same_program_and_another_file_is_not(tmp_path):
    own = tmp_path / "own_step.py"
    source = "def step(w):\n    return w @ w\n"
    found = []
    for text in (source, source, "\n" + source):
        own.write_text(text)
        step = runpy.run_path(str(own))["step"]
        if not found:
            found.append(rehearsed(tmp_path / "cache", step).from_cache)
        else:  # the same from another line
            found.append(rehearsed(tmp_path / "cache", step).from_cache)
    assert found == [False, True, False]


def test_the_compiling_process_imports_few_rooms():
    code = (
        "import sys, meshwright.rehearsal.compiler_worker\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('meshwright.')}\n"
        "print(*sorted(room for room in rooms if not room.startswith('_')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["errors", "hardware", "hlo", "rehearsal"]
