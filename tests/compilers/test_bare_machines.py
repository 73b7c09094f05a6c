"""Hardware by name on machines that lack it: without GPU or TPU, without any CUDA toolkit."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compilers

SCRIPT = """
import jax, jax.numpy as jnp, meshwright as mw
from meshwright.errors import RehearsalError
{first}

w = jax.ShapeDtypeStruct((256, 256), "bfloat16")
for on in {names}:
    print(on, mw.mesh("fsdp:-1", on=on).size)
    try:
        r = mw.rehearse(lambda w, x: jnp.tanh(x @ w), w, w, mesh="fsdp:-1", on=on, cache=False)
        print(r.fits, r.compiler.split()[0])
    except RehearsalError as error:
        print(error)
"""
REHEARSED = "h100:8 8\nTrue jax-cuda13-plugin\n"


def run(names, *, first="", prefix=(), **changes):
    variables = {name: value for name, value in {**os.environ, **changes}.items() if value}
    return subprocess.run(
        [*prefix, sys.executable, "-c", SCRIPT.format(names=names, first=first)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def unasked(printed):
    """Lines but those of progress, which a busy machine has."""
    return [line for line in printed.splitlines() if not re.search(r", \d+ s$", line)]


@pytest.mark.parametrize("platforms", ["", "cpu", "cuda", "tpu"])
def test_named_hardware_works_whatever_jax_platforms_is_and_prints_nothing(platforms):
    done = run(["h100:8", "v5e:4x4"], JAX_PLATFORMS=platforms)
    assert unasked(done.stderr) == []
    assert done.stdout == f"{REHEARSED}v5e:4x4 16\nTrue libtpu\n"


@pytest.mark.parametrize("words", ["devices", "rehearse tiny --mesh fsdp:8 --on h100:8 --batch 16"])
def test_the_command_line_lets_nothing_of_the_compilers_through(words, tmp_path):
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    variables.pop("JAX_PLATFORMS", None)
    command = [sys.executable, "-m", "meshwright", *words.split(), "--json"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert json.loads(done.stdout)["devices"] > 0
    own = "tiny on h100:8: "  # what is being done, said every 15 seconds
    assert [line for line in done.stderr.splitlines() if not line.startswith(own)] == []


def test_gpus_can_be_named_after_jax_has_refused_their_plugin():
    done = run(["h100:8"], first="jnp.ones(2).sum()", JAX_PLATFORMS="")
    assert done.stdout == REHEARSED  # on stderr is what JAX itself wrote when it started


def hiding(*more):
    """Return the start of a command that sees no toolkit, nor the folders of `more`."""
    namespace = ["unshare", "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    allowed = shutil.which("unshare") and subprocess.run(
        [*namespace, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    if not allowed or allowed.returncode:
        pytest.skip("a toolkit is hidden by a mount of one's own, which is not allowed here")
    toolkits = [path for path in Path("/usr/local").glob("cuda*") if not path.is_symlink()]
    mounts = "".join(f"mount -t tmpfs none '{path}'; " for path in [*toolkits, *more])
    return [*namespace, "sh", "-e", "-c", f'{mounts}exec "$@"', "sh"]


def run_without_toolkit(*hidden):
    """Rehearse for GPUs; no tool is left by a path or a variable either."""
    folders = os.environ["PATH"].split(os.pathsep)
    path = [folder for folder in folders if not Path(folder, "ptxas").exists()]
    return run(
        ["h100:8"],
        prefix=hiding(*hidden),
        PATH=os.pathsep.join(path),
        LD_LIBRARY_PATH="",
        CUDA_HOME="",
        CUDA_PATH="",
        JAX_PLATFORMS="",
    )


def test_a_gpu_is_rehearsed_without_a_cuda_toolkit():
    done = run_without_toolkit()
    assert done.stdout == REHEARSED
    assert unasked(done.stderr) == []


@pytest.mark.parametrize(("folder", "missing"), [("nvvm", "libdevice"), ("bin", "ptxas")])
def test_a_gpu_compiler_without_its_tools_names_the_packages(folder, missing):
    tools = importlib.util.find_spec("nvidia").submodule_search_locations[0]
    done = run_without_toolkit(Path(tools, "cu13", folder))
    assert missing in done.stdout
    assert "pip install nvidia-nvvm nvidia-cuda-nvcc" in done.stdout
