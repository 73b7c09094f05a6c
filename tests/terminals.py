"""What a program prints on a terminal."""

import os
import subprocess
import sys


def on_a_terminal(*words: str) -> bytes:
    """The output of `meshwright` with these words, which must end well."""
    return run_on_a_terminal("-m", "meshwright", *words)


def run_on_a_terminal(*words: str, errors: bool = False) -> bytes:
    """The output of Python with these words, or its errors too."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    where = {"stdout": theirs, "stderr": theirs if errors else None}
    with subprocess.Popen([sys.executable, *words], env=environment, **where) as process:
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
