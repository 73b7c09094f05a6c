"""`meshwright measure`: models, steps of one's own, and what is told in a line."""

import json
import sys

import pytest

from meshwright.cli.main import main

JOBS = """
import jax, jax.numpy as jnp, numpy as np, meshwright as mw
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = mw.mesh("fsdp:4", devices=jax.devices()[:4])
sharding = NamedSharding(mesh, P("fsdp"))
step = jax.jit(lambda x: x @ x)

def placed():
    return step, jax.device_put(jnp.ones((64, 64)), sharding)

def alone():
    return step, jnp.ones((64, 64))

def by_jit():
    return jax.jit(lambda x: x + 1, in_shardings=sharding), np.ones((64, 64), "float32")

def in_dict():
    return {"step": placed()[0], "args": placed()[1:], "mesh": mesh}

def misspelt():
    return {"step": placed()[0], "args": placed()[1:], "mehs": mesh}

def mesh_as_text():
    return {"step": placed()[0], "args": placed()[1:], "mesh": "fsdp:4"}

def other_mesh():
    return {"step": placed()[0], "args": placed()[1:], "mesh": mw.mesh("dp:8")}

def load(x):
    raise ValueError("no such shard: 17")

def in_callback():
    return jax.jit(lambda x: jax.pure_callback(load, x, x)), jnp.ones(3)

def in_tracing():
    return jax.jit(load), jnp.ones(3)
"""


LINE = 1 + JOBS.splitlines().index('    raise ValueError("no such shard: 17")')


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    (tmp_path / "own_jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    # The module is another in every test: its file is.
    monkeypatch.delitem(sys.modules, "own_jobs", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("job", "mesh"),
    [("placed", "fsdp:4"), ("alone", "devices:1"), ("by_jit", "fsdp:4"), ("in_dict", "fsdp:4")],
)
def test_a_job_is_rehearsed_on_its_own_mesh(jobs, capsys, job, mesh):
    words = ["measure", f"own_jobs:{job}", "--rehearse", "--steps", "1", "--json"]
    assert main(words) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["mesh"] == measured["rehearsed"]["mesh"] == mesh
    assert measured["rehearsed"]["name"] == measured["name"] == f"own_jobs:{job}"
    assert not any(note.startswith("Rehearsed was") for note in measured["notes"])


BAD = [
    (
        "misspelt",
        "own_jobs:misspelt returned 'mehs', which measure does not take. A dict has step,",
    ),
    ("misspelt", "args and mesh. Did you mean 'mesh'?"),
    ("mesh_as_text", "own_jobs:mesh_as_text returned mesh='fsdp:4', which is not a jax.sharding"),
    ("other_mesh", "own_jobs:other_mesh: mesh: the step is compiled for 4 devices"),
    ("in_callback", "own_jobs:in_callback: its step failed: ValueError: no such shard: 17 ("),
    ("in_callback", f"own_jobs.py:{LINE})\n"),
    ("in_tracing", "own_jobs:in_tracing: its step failed: ValueError: no such shard: 17 ("),
]


@pytest.mark.parametrize(("job", "words"), BAD)
def test_what_is_wrong_with_a_job_is_told_in_a_line(jobs, capsys, job, words):
    assert main(["measure", f"own_jobs:{job}", "--steps", "1"]) == 2
    told = capsys.readouterr().err
    assert words in told and "--mesh" not in told and "Traceback" not in told


@pytest.mark.parametrize("batch", ["0", "-4"])
def test_a_batch_without_rows_is_refused(capsys, batch):
    assert main(["measure", "tiny", "--batch", batch, "--mesh", "fsdp:8"]) == 2
    assert f"--batch: {batch} is not a positive integer." in capsys.readouterr().err
