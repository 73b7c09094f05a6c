"""Ports for the processes of a test."""

import random
import socket

# Below those that systems hand out by themselves: nobody gets one by chance before it is used.
_OURS = range(10_000, 32_000)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(_OURS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
