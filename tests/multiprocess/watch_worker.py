"""One process of several that work in turns, under watch; at one turn something happens to it."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection

import jax

from meshwright import _compat
from meshwright.watchdog import os_process
from meshwright.watchdog.watchdog import Watchdog

TURNS, TURN = 30, 20
LONG = 100.0


def start(port: int, me: int, processes: int) -> None:
    """Join the others over loopback. No device is touched."""
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, processes, me, coordinator_bind_address=address, initialization_timeout=int(LONG)
    )


def happen(what: str) -> None:
    """The fault; those that come from outside find the process asleep."""
    if what == "far, raises":
        raise ConnectionError("of its own")
    if what == "raises":
        raise ValueError("no luck,\nnone at all")
    if what == "aborts":  # as a failed check in a library does, while others may run
        ctypes.CDLL(None).abort()
    if what == "aborts, blocked":
        os.abort()
    if what == "blocks":  # no other thread of Python runs meanwhile
        ctypes.PyDLL(None).sleep(int(LONG))
    if what == "leaves":
        sys.exit(0)
    time.sleep(LONG)


def until_told(client, me: int, task: str) -> None:
    """Until the others can know what this process is in."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        told = dict(client.key_value_dir_get("meshwright/watch/run/0"))
        if any(key.endswith(f"/{me}") and task in text for key, text in told.items()):
            time.sleep(0.5)  # more than a turn of theirs
            return


def work(watch: Watchdog, me: int, processes: int, what: str, here: Connection) -> None:
    """Each turn needs what the process before has made, and process 0 that of the last."""
    client = _compat.coordination_client()
    before = (me - 1) % processes
    for turn in range(TURNS):
        watch.step = turn
        needed = turn if me else turn - 1
        if needed >= 0:
            watch.waiting = f"{before}F{needed} of process {before}"
            client.blocking_key_value_get(f"test/{before}/{needed}", int(1000 * LONG))
        watch.doing = f"{me}F{turn}"
        if turn == TURN and what.removeprefix("far"):
            until_told(client, me, watch.doing)
            here.send("here")
            happen(what)
        client.key_value_set(f"test/{me}/{turn}", "made")


def handlers() -> list:
    """What the system and Python do about signals, and about errors."""
    numbers = (signal.SIGTERM, signal.SIGABRT, signal.SIGINT, signal.SIGSEGV)
    actions = [os_process._get_action(number) for number in numbers]
    # The system's library adds a flag of its own, SA_RESTORER, to whatever is set.
    system = [(action.handler, action.flags & ~0x04000000) for action in actions]
    return [*system, *(signal.getsignal(number) for number in numbers), sys.excepthook]


def main(
    port: int,
    me: int,
    processes: int,
    what: str,
    timeout: float,
    errors: str,
    here: Connection,
) -> None:
    """All that is printed goes to the file `errors`; `here` hears of the fault, or of the end."""
    output = os.open(errors, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(LONG, exit=True)
    warnings.simplefilter("error")
    if "far" in what:  # as if each were on a machine of its own
        os_process.identity = str
    start(port, me, processes)
    found = handlers()
    with Watchdog(timeout=timeout) as watch:
        work(watch, me, processes, what, here)
    with contextlib.suppress(SystemExit), Watchdog() as second:
        second.doing = "a second time"
        sys.exit(0)
    here.send("restored" if handlers() == found else "a handler was left behind")
    jax.distributed.shutdown()
