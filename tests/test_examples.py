"""Every example runs to its end, shows what it is there to show, and complains about nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
DEADLINE = 240

# What an example must print; of any other, that it prints something.
TRAINS = ("(8 devices): ", "@fsdp", "@tp", "on a device", "loss after 10 steps: ")
SHOWS = {
    "demo.py": (
        "runner-up",
        "fits (CPU estimate): ",
        "both runs agree",
        "What to do next",
        "works offline",
    ),
    "equinox_mlp.py": (*TRAINS, "layers/0/up/weight    f32[1024@tp,256@fsdp]"),
    "flax_linen.py": (*TRAINS, "opt_state/0/trace/layer_0/up/kernel", "is P('fsdp', 'tp')"),
    "flax_nnx.py": (*TRAINS, "layers/0/up/kernel", "is P('fsdp', 'tp')"),
    "optax_adamw.py": (*TRAINS, "mu/up     f32[256@fsdp,1024@tp]", "nu/scale  f32[256] "),
    "transformer_pipeline.py": ("stage  group", "zb-h1: 4 groups", "loss after 10 steps: "),
    "serving.py": (
        "── 3.00 MiB ──▶",
        "4 of [4,8,96,1,32]  4 of [4,4,96,2,32]",
        "384 tokens: equal to one device's without a cache",
        "3.00 MiB, inside a process: ",
    ),
    "plain_pytree.py": (*TRAINS, "by shape: 7 arrays", "by rules: 7 arrays"),
}
COMPARING = [path for path in EXAMPLES if "def compare(" in path.read_text()]

every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def run(*words, cwd=None):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=cwd,
    )


@every_example
def test_example_runs_and_shows_what_it_should(path, tmp_path):
    done = run(path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # What takes long on a busy machine says how far it is.
    assert [line for line in done.stderr.splitlines() if not re.search(r", \d+ s$", line)] == []
    assert done.stdout.strip()
    assert [words for words in SHOWS.get(path.name, ()) if words not in done.stdout] == []


def test_the_demo_stops_when_its_runs_disagree_or_learn_nothing():
    code = """
import runpy, sys
check_same = runpy.run_path(sys.argv[1])["check_same"]
for ours, theirs in (([2, 0.5], [2, 0.50001]), ([2, 0.5], [2, 0.51]), ([2, 1.5], [2, 1.5])):
    try:
        check_same(ours, theirs)
    except SystemExit as stop:
        print(stop)
"""
    done = run("-c", code, EXAMPLES[0].parent / "demo.py")
    assert done.stdout.splitlines() == [
        "both runs agree: at most 2.0e-05 apart",
        "the pipeline's losses are 2.0e-02 from the sharded run's",
        "the loss did not fall: 2.0000 to 1.5000",
    ], done.stderr


def test_no_expected_example_is_gone():
    assert set(SHOWS) <= {path.name for path in EXAMPLES}
    assert len(COMPARING) == 6


@pytest.mark.parametrize("path", COMPARING, ids=lambda path: path.stem)
def test_example_stops_when_the_two_runs_disagree(path):
    code = """
import runpy, sys
compare = runpy.run_path(sys.argv[1])["compare"]
for ours in (1.000001, 1.001, float("nan")):
    try:
        compare(ours, 1.0)
        print(ours, "agrees")
    except SystemExit as stop:
        print(ours, stop)
"""
    done = run("-c", code, path)
    disagrees = "the sharded run disagrees with the one on a single device"
    assert done.stdout == f"1.000001 agrees\n1.001 {disagrees}\nnan {disagrees}\n", done.stderr
