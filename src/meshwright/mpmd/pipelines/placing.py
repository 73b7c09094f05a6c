"""Bring a step's arguments and constants to the groups that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.mpmd.pipelines.board import Board


def settle_constants(board: Board) -> None:
    """Constants are placed once, not in every step."""
    cells = list(board.fixed)
    placed = put([board.lies[cell] for cell in cells], *(board.fixed[cell] for cell in cells))
    board.fixed.update(zip(cells, placed, strict=True))


def begin(board: Board, arrays: Sequence[Any]) -> list[Any]:
    """Fresh cells with the constants and the arguments; those that lie right stay."""
    cells: list[Any] = [None] * len(board.avals)
    for cell, value in board.fixed.items():
        cells[cell] = value
    away = []
    for argument in board.placed:
        value = arrays[argument.number]
        if getattr(value, "sharding", None) == argument.sharding:
            cells[argument.cell] = value
        else:
            away.append(argument)
    values = [arrays[argument.number] for argument in away]
    for argument, value in zip(away, put([a.sharding for a in away], *values), strict=True):
        cells[argument.cell] = value
    return cells


def put(targets: Sequence[NamedSharding | None], *values: Any) -> list[Any]:
    """One call of JAX for all values."""
    found: list[Any] = jax.device_put(list(values), list(targets))
    return found
