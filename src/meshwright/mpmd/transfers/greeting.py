"""A byte from each process to each, when a link is made: all can be reached, and stay connected.

A pull from an address where nobody listens would wait for ever, and one over a connection that
is still being made is lost when the other side closes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshwright.errors import TransferError, listing
from meshwright.mpmd.transfers.keys import number

_PAUSE = 0.001


def greet(
    room: str, server: Any, peers: Mapping[int, Any], there: Mapping[int, str], patience: float
) -> None:
    me, device = jax.process_index(), jax.local_devices()[0]
    byte = jax.device_put(np.zeros(1, np.uint8), device)
    shape = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (1,), np.uint8, sharding=SingleDeviceSharding(device)
    )
    for peer in peers:
        server.await_pull(number("greeting", room, 0, me, peer), [byte])
    answers = {
        peer: peers[peer].pull(number("greeting", room, 0, peer, me), [shape])[0] for peer in peers
    }
    end = time.monotonic() + patience
    silent = [peer for peer, answer in answers.items() if not _arrives(answer, end)]
    if silent:
        shown = listing(f"{peer} at {there[peer]}" for peer in silent)
        raise TransferError(
            f"connect: process {shown} cannot be reached, or did not answer within "
            f"{patience:g} s. Give each process the address= of an interface that the others "
            "can reach."
        )


def _arrives(answer: Any, end: float) -> bool:
    while not answer.is_ready():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    try:
        answer.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True
