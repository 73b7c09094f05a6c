"""What a command prints on a terminal."""

import os
import subprocess
import sys


def on_a_terminal(*words: str) -> bytes:
    """The output of `meshwright` with these words, which must end well."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "meshwright", *words]
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while chunk := _read(ours):
            seen += chunk
        assert process.wait(timeout=120) == 0
    os.close(ours)
    return seen


def _read(end: int) -> bytes:
    try:
        return os.read(end, 65536)
    except OSError:  # the other end is closed: the program has ended
        return b""
