"""How a worker process joins the others of its test, and tells what it saw."""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable

import jax

TIMEOUT = 240  # seconds, on a busy machine too


def start(port: int, me: int, processes: int, devices: int) -> None:
    """So many devices of its own, and the others over loopback, if there are any."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_disable_most_optimizations", True)  # see conftest.py
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            address,
            processes,
            me,
            coordinator_bind_address=address,
            initialization_timeout=TIMEOUT,
        )


def tell(report: Callable[[], dict]) -> None:
    """Print a report as JSON; warnings are errors."""
    warnings.simplefilter("error")
    try:
        print(json.dumps(report()), flush=True)
    except BaseException:
        # Leave at once: at exit JAX would wait minutes for the process that waits for this one.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
