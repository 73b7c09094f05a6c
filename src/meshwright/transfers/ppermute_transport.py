"""Send pieces of arrays across processes by a collective program that shifts rows of integers.

The same on CPUs, GPUs and TPUs: it needs no ports or flags of its own, and computes with no value,
so every bit of every dtype arrives. It spans all devices, for some TPUs run nothing less, so all
processes call it. A message is the bytes of its pieces, end to end; `message_plan` says which.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from meshwright.transfers.boxes import Box, box_shape
from meshwright.transfers.message_plan import Pair, Piece, plan_messages, process_of
from meshwright.transfers.moves import HostArray, LocalShards, Move, Received, bit_pattern
from meshwright.trees.specs import make_spec

# Rows are made of blocks of 32-bit integers that fill whole tiles of a TPU's memory, unpadded.
_LANES = 128
_BLOCK = 8 * _LANES * 4
# Bytes that a process sends at once, over all its devices: what is on its way stays bounded.
_CHUNK = 8 * 2**20
_ROWS = make_spec(["device"])


def exchange_pieces(moves: Sequence[Move], local: Sequence[LocalShards]) -> list[Received]:
    """Return, per array, the pieces that this process needs and lacks. All processes call it."""
    received: list[dict[Box, HostArray]] = [{} for _ in moves]
    messages = plan_messages(moves)
    sizes = {pair: sum(piece.bytes for piece in message) for pair, message in messages.items()}
    process = jax.process_index()
    for pairs in rounds(sizes):
        sent = next((pair for pair in pairs if pair[0] == process), None)
        expected = next((pair for pair in pairs if pair[1] == process), None)
        outgoing = pack(messages[sent], local) if sent else None
        incoming = send_bytes(pairs, max(sizes[pair] for pair in pairs), outgoing)
        if expected and incoming is not None:
            unpack(messages[expected], incoming, moves, received)
    return list(received)


def rounds(sizes: Mapping[Pair, int]) -> list[tuple[Pair, ...]]:
    """Return which messages travel together: in a round no process sends or receives twice.

    The largest first, each in the first round that has room for it: a round takes as long as its
    longest message, so those of like size should share one.

    >>> rounds({(0, 1): 9, (0, 2): 9, (2, 1): 5, (1, 0): 5})
    [((0, 1), (1, 0)), ((0, 2), (2, 1))]
    """
    receivers: list[dict[int, int]] = []  # per round, by sender
    for sender, receiver in sorted(sizes, key=lambda pair: (-sizes[pair], pair)):
        for together in receivers:
            if sender not in together and receiver not in together.values():
                break
        else:
            together = {}
            receivers.append(together)
        together[sender] = receiver
    return [tuple(together.items()) for together in receivers]


def pack(message: Sequence[Piece], local: Sequence[LocalShards]) -> HostArray:
    out = np.empty(sum(piece.bytes for piece in message), np.uint8)
    at = 0
    for piece in message:
        overlap = piece.overlap
        values = local[piece.array].bits(overlap.source)[overlap.take]
        out[at : at + piece.bytes].view(values.dtype).reshape(values.shape)[...] = values
        at += piece.bytes
    return out


def unpack(
    message: Sequence[Piece],
    incoming: HostArray,
    moves: Sequence[Move],
    received: Sequence[dict[Box, HostArray]],
) -> None:
    at = 0
    for piece in message:
        box = piece.overlap.box
        values = incoming[at : at + piece.bytes].view(moves[piece.array].dtype)
        received[piece.array][box] = bit_pattern(values).reshape(box_shape(box))
        at += piece.bytes


# The program: one message per pair of processes, at once.
#
# Device i of a sender shifts its row to device i of the receiver. A message longer than what all
# devices of a process hold in a row goes in several chunks, one call of the program each.


@dataclasses.dataclass(frozen=True)
class Network:
    """All devices in a line: where those of each process stand in it, and how many of them send."""

    mesh: Mesh
    positions: dict[int, list[int]]
    width: int


@functools.lru_cache(maxsize=8)
def make_network(devices: tuple[Any, ...]) -> Network:
    positions: dict[int, list[int]] = {}
    for position, device in enumerate(devices):
        positions.setdefault(process_of(device), []).append(position)
    mesh = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    return Network(mesh, positions, min(map(len, positions.values())))


def send_bytes(pairs: Sequence[Pair], size: int, outgoing: HostArray | None) -> HostArray | None:
    """Send one message per pair, all at once; return the message to this process, if any.

    `size` is that of the longest message, known to all. What arrives is padded to it or more.
    """
    devices, process = tuple(jax.devices()), jax.process_index()
    network = make_network(devices)
    row = row_bytes(size, network.width)
    chunk = row * network.width
    starts = range(0, size, chunk)
    incoming = None
    if any(receiver == process for _, receiver in pairs):
        incoming = np.empty(len(starts) * chunk, np.uint8)
    program = shift_program(devices, tuple(sorted(pairs)))
    for start in starts:
        # A mesh that the caller has set would be taken for the program's own.
        with jax.set_mesh(network.mesh):
            shifted = program(_rows_to_send(network, row, outgoing, start))
            jax.block_until_ready(shifted)  # type: ignore[no-untyped-call]
        if incoming is not None:
            rows = incoming[start : start + chunk].reshape(network.width, row)
            _read_rows(network, shifted, rows)
    return incoming


def row_bytes(size: int, width: int) -> int:
    """Return the bytes per device and call: whole blocks, and few different sizes to compile for.

    The size is rounded up to four leading bits, so that it grows by an eighth at most.

    >>> row_bytes(1, 4), row_bytes(100_000, 1), row_bytes(2**30, 4)
    (4096, 106496, 2097152)
    """
    row = min(-(-size // width), _CHUNK // width)
    step = max(_BLOCK, 1 << max(0, row.bit_length() - 4))
    return -(-row // step) * step


@functools.lru_cache(maxsize=256)
def shift_program(devices: tuple[Any, ...], pairs: tuple[Pair, ...]) -> Any:
    """Return the program that shifts rows from each sender's devices to its receiver's."""
    network = make_network(devices)
    shifts = [
        (network.positions[sender][line], network.positions[receiver][line])
        for sender, receiver in pairs
        for line in range(network.width)
    ]
    shifted = jax.shard_map(
        lambda row: jax.lax.ppermute(row, "device", shifts),  # type: ignore[no-untyped-call]
        mesh=network.mesh,
        in_specs=_ROWS,
        out_specs=_ROWS,
    )
    return jax.jit(shifted, donate_argnums=0)


def _rows_to_send(network: Network, row: int, outgoing: HostArray | None, start: int) -> jax.Array:
    """Return the chunk at `start`, a row for each device; this process fills only its own."""
    height = row // 4 // _LANES
    positions = network.positions[jax.process_index()]

    def fill(index: Any) -> HostArray:
        # Who sends nothing takes part with zeros, as do devices that others have no partner for.
        values = np.zeros(row, np.uint8)
        line = positions.index((index[0].start or 0) // height)
        if outgoing is not None and line < network.width:
            part = outgoing[start + line * row : start + (line + 1) * row]
            values[: part.size] = part
        return values.view(np.uint32).reshape(height, _LANES)

    shape = (network.mesh.size * height, _LANES)
    rows = NamedSharding(network.mesh, _ROWS)
    return jax.make_array_from_callback(shape, rows, fill, dtype=np.dtype(np.uint32))


def _read_rows(network: Network, shifted: jax.Array, rows: HostArray) -> None:
    """Write what came to this process's devices into `rows`, one for each."""
    data = {shard.device: shard.data for shard in shifted.addressable_shards}
    for line, position in enumerate(network.positions[jax.process_index()][: network.width]):
        values = np.asarray(data[network.mesh.devices[position]])
        rows[line] = values.reshape(-1).view(np.uint8)
