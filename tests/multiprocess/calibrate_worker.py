"""One process of several that calibrate together; one of them is stopped most of the time."""

import json
import os
import signal
import subprocess
import sys

import jax
from joining import start, tell

import meshwright as mw

# Stops a process for three quarters of the time, as long as its parent lives.
_STOPPING = """
import os, signal, sys, time
while os.getppid() == int(sys.argv[1]):
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.003)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.001)
"""


def report(slow: int) -> dict:
    if jax.process_index() == slow:
        words = [sys.executable, "-c", _STOPPING, str(os.getpid())]
        stopping = subprocess.Popen(words)
        try:
            measured = mw.calibrate(quick=True, only=_ONLY, progress=False)
        finally:
            stopping.kill()
            os.kill(os.getpid(), signal.SIGCONT)
    else:
        measured = mw.calibrate(quick=True, only=_ONLY, progress=False)
    told = mw.compare_calibrations(measured)
    return {
        "same": json.dumps(measured.to_json()),
        "slow": [each.where for each in told.processes],
        "shown": str(told),
    }


_ONLY = ["products", "functions", "collectives"]


if __name__ == "__main__":
    port, me, processes, slow = map(int, sys.argv[1:5])
    start(port, me, processes, 1)
    tell(lambda: report(slow))
