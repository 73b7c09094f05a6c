"""Compile a step's programs ahead of time, several at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshwright._progress import Bar
from meshwright.mpmd.pipelines.board import Board
from meshwright.mpmd.pipelines.operations import Code, Operation

# From a lowered program to one that answers as `jax.stages.Compiled` does.
Compile = Callable[[Code, Operation, Any], Any]

_TICK = 0.2  # seconds between two looks at a program that is being compiled


def compile_here(_: Code, __: Operation, program: Any) -> Any:
    """In this process, for devices of its own."""
    return program.compile()


def compile_all(
    board: Board, operations: Sequence[Operation], compile_one: Compile = compile_here
) -> None:
    """Compile what the operations run, each program once, in waves.

    How some values lie is known only when the program that makes them is compiled: programs
    that take them wait for the next wave.
    """
    waiting: dict[int, tuple[Code, Operation]] = {}
    for operation in operations:
        if operation.code is not None and operation.code.compiled is None:
            waiting.setdefault(id(operation.code), (operation.code, operation))
    total = len(waiting)
    threads = min(total or 1, os.cpu_count() or 1)
    with Bar("pipeline") as bar, _threads(threads) as pool:
        while waiting:
            ready = [
                (code, operation, _lower(board, code, operation))
                for code, operation in waiting.values()
                if all(board.lies[cell] is not None for cell in operation.ins)
            ]
            made = [(each[0], pool.submit(compile_one, *each)) for each in ready]
            for code, future in made:
                while not concurrent.futures.wait([future], _TICK).done:
                    bar.now(f"compiling {code.name}", total - len(waiting), total)
                code.compiled = future.result()
                del waiting[id(code)]
            _learn(board, operations)
    for operation in operations:
        if operation.code is not None:
            operation.call = operation.code.compiled


@contextlib.contextmanager
def _threads(count: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that nobody waits for where one has failed, or the user interrupts."""
    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _lower(board: Board, code: Code, operation: Operation) -> Any:
    shapes = [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            board.avals[cell].shape, board.avals[cell].dtype, sharding=board.lies[cell]
        )
        for cell in operation.ins
    ]
    jitted = jax.jit(code.fn, out_shardings=code.outs, donate_argnums=code.donated)
    # A mesh that the caller has set would be taken for the program's own.
    with jax.set_mesh(board.layouts.meshes[operation.group]):
        return jitted.lower(*shapes)


def _learn(board: Board, operations: Sequence[Operation]) -> None:
    """How results lie that the compiler was free to place."""
    for operation in operations:
        code = operation.code
        if code is None or code.compiled is None or None not in code.outs:
            continue
        for cell, sharding in zip(operation.outs, code.compiled.output_shardings, strict=True):
            if board.lies[cell] is None:
                board.lies[cell] = sharding
