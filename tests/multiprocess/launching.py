"""Start the processes of a test, each its own interpreter, and collect what they print."""

import contextlib
import json
import socket
import subprocess
import sys
import time


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(worker, processes, *arguments, deadline=120):
    """The last line that each process printed, as JSON; all must end well, and in time."""
    port = free_port()
    end = time.monotonic() + deadline
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
        done = [process.communicate(timeout=end - time.monotonic()) for process in running]
    errors = "\n".join(error[-4000:] for _, error in done)
    assert [process.returncode for process in running] == [0] * processes, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in done]
