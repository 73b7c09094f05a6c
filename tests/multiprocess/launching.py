"""Start the processes of a test, each its own interpreter, and collect what they print."""

import contextlib
import functools
import json
import subprocess
import sys
import time

from ports import free_port


def in_time(run, soon, tries=3):
    """What `run` gives, at once or again: a busy machine may be late once, but not each time."""
    for _ in range(tries - 1):
        found = run()
        if soon(found):
            return found
    return run()


def launch(worker, processes, *arguments, deadline=300):
    """The last line that each process printed, as JSON; all must end well, and in time.

    A worker gets a port, its number, the count of processes, then `arguments`. What has run once
    is remembered with its arguments, so that tests share it, and a failure is not run again.
    """
    done = _ended(worker, processes, arguments, deadline)
    faults = [f"process {me}: exit {rc}\n{e[-4000:]}" for me, (rc, _, e) in enumerate(done) if rc]
    assert not faults, "\n".join(faults)
    return [json.loads(output.splitlines()[-1]) for _, output, _ in done]


@contextlib.contextmanager
def begun(worker, processes, *arguments):
    """The processes while they run; those that are left at the end are killed."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        running = []
        for me in range(processes):
            command = [sys.executable, str(worker), *map(str, (port, me, processes, *arguments))]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        yield running


@functools.cache
def _ended(worker, processes, arguments, deadline):
    """Exit status, output and errors of each process; one that is late is killed."""
    end = time.monotonic() + deadline
    with begun(worker, processes, *arguments) as running:
        return [_finish(process, end) for process in running]


def _finish(process, end):
    try:
        said = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        said = process.communicate()
    return process.returncode, *said
