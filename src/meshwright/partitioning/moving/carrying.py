"""Bytes from process to process, by a program that shifts rows of integers between devices.

The same on CPUs, GPUs and TPUs; it needs no ports or flags of its own, and no value is ever
computed with. It spans all devices, for some TPUs run nothing less, so all processes call it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from meshwright.partitioning.moving.moves import HostArray
from meshwright.partitioning.specs import make_spec

Pair = tuple[int, int]  # sending process, receiving process

# A row is made of blocks of 32-bit integers that fill whole tiles of a TPU's memory, unpadded.
_LANES = 128
_BLOCK = 8 * _LANES * 4
# Bytes that a process sends at once, over all its devices.
_LOAD = 8 * 2**20
_ROWS = make_spec(["device"])


@dataclasses.dataclass(frozen=True)
class Network:
    """All devices in a line, where each process's stand in it, and how many of them send."""

    mesh: Mesh
    places: dict[int, list[int]]
    width: int


@functools.lru_cache(maxsize=8)
def network(devices: tuple[Any, ...]) -> Network:
    places: dict[int, list[int]] = {}
    for place, device in enumerate(devices):
        places.setdefault(device.process_index, []).append(place)
    mesh = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    return Network(mesh, places, min(map(len, places.values())))


def carry(pairs: Sequence[Pair], size: int, outgoing: HostArray | None) -> HostArray | None:
    """Send one message per pair, all at once; returns the message to this process, if any.

    `size` is that of the longest message, known to all. What arrives is padded to it or more.
    """
    devices, me = tuple(jax.devices()), jax.process_index()
    net = network(devices)
    row = row_bytes(size, net.width)
    load = row * net.width
    loads = range(0, size, load)
    incoming = None
    if any(receiver == me for _, receiver in pairs):
        incoming = np.empty(len(loads) * load, np.uint8)
    program = carrier(devices, tuple(sorted(pairs)))
    for start in loads:
        # A mesh that the caller has set would be taken for the program's own.
        with jax.set_mesh(net.mesh):
            shifted = program(_loaded(net, row, outgoing, start))
            jax.block_until_ready(shifted)  # type: ignore[no-untyped-call]
        if incoming is not None:
            _unload(net, shifted, incoming[start : start + load].reshape(net.width, row))
    return incoming


def row_bytes(size: int, width: int) -> int:
    """Bytes per device and program: whole blocks, and few different sizes to compile for.

    >>> row_bytes(1, 4), row_bytes(100_000, 1), row_bytes(2**30, 4)
    (4096, 106496, 2097152)
    """
    row = min(-(-size // width), _LOAD // width)
    step = max(_BLOCK, 1 << max(0, row.bit_length() - 4))
    return -(-row // step) * step


@functools.lru_cache(maxsize=256)
def carrier(devices: tuple[Any, ...], pairs: tuple[Pair, ...]) -> Any:
    """The program that shifts rows; device by device from the sender's to the receiver's."""
    net = network(devices)
    shifts = [
        (net.places[sender][line], net.places[receiver][line])
        for sender, receiver in pairs
        for line in range(net.width)
    ]
    shifted = jax.shard_map(
        lambda row: jax.lax.ppermute(row, "device", shifts),  # type: ignore[no-untyped-call]
        mesh=net.mesh,
        in_specs=_ROWS,
        out_specs=_ROWS,
    )
    return jax.jit(shifted, donate_argnums=0)


def _loaded(net: Network, row: int, outgoing: HostArray | None, start: int) -> jax.Array:
    """The message from `start`, a row for each device of this process; the others' are theirs."""
    height = row // 4 // _LANES
    places = net.places[jax.process_index()]

    def fill(index: Any) -> HostArray:
        room = np.zeros(row, np.uint8)
        line = places.index((index[0].start or 0) // height)
        if outgoing is not None and line < net.width:
            part = outgoing[start + line * row : start + (line + 1) * row]
            room[: part.size] = part
        return room.view(np.uint32).reshape(height, _LANES)

    shape = (net.mesh.size * height, _LANES)
    rows = NamedSharding(net.mesh, _ROWS)
    return jax.make_array_from_callback(shape, rows, fill, dtype=np.dtype(np.uint32))


def _unload(net: Network, shifted: jax.Array, room: HostArray) -> None:
    """What arrived on this process's devices, line by line."""
    data = {shard.device: shard.data for shard in shifted.addressable_shards}
    for line, place in enumerate(net.places[jax.process_index()][: net.width]):
        room[line] = np.asarray(data[net.mesh.devices[place]]).reshape(-1).view(np.uint8)
