"""One process of several that calibrate together.

python calibrate_worker.py PORT ME PROCESSES SLOW PART ...
SLOW is the number of a process whose programs are compiled without optimisation: its kernels take
several times as long as those of the others, whatever else runs on the machine. With the part
"mesh", that of process 0's devices alone is calibrated; with "interrupt" process 1 gets Ctrl-C as
soon as `calibrate` listens to it.
"""

import json
import os
import signal
import sys
import threading
import time

import jax
from joining import start, tell

import meshwright as mw
from meshwright import _progress


def interrupt() -> None:
    """Send this process a signal once `calibrate` has a handler for it."""
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


def report() -> dict:
    if parts == ["mesh"]:
        mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
        try:
            mw.calibrate(mesh, quick=True)
        except mw.errors.CalibrationError as error:
            return {"refused": str(error)}
    if parts == ["interrupt"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if me == 1:
            threading.Thread(target=interrupt).start()
        measured = mw.calibrate(quick=True)
        return {"interrupted": measured.interrupted, "left_out": measured.left_out}
    measured = mw.calibrate(quick=True, only=parts)
    return {"same": json.dumps(measured.to_json())}


if __name__ == "__main__":
    port, me, processes, slow = map(int, sys.argv[1:5])
    parts = sys.argv[5:]
    start(port, me, processes, 1)
    jax.config.update("jax_disable_most_optimizations", slow in (me, processes))
    _progress._LINES = 0.05  # so that tests see what is going on
    tell(report)
