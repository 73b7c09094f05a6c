"""Eight simulated devices for every test, set before any backend starts, and a cache of its own."""

import gc
import os
import shutil
import tempfile

import jax

# Tracing makes many small objects that live on: looking through them less often saves a twentieth.
gc.set_threshold(20_000, 20, 20)

jax.config.update("jax_num_cpu_devices", 8)
# Only the code for the CPU is simpler by this; partitioning and fusing are the same. Compiling is
# most of the suite's time, and this halves it.
jax.config.update("jax_disable_most_optimizations", True)

# What is compiled is kept for the run, all its processes together, and for nobody else.
_FIRST = "PYTEST_XDIST_WORKER" not in os.environ
if _FIRST:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="meshwright-tests-")


def pytest_unconfigure():
    if _FIRST:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
