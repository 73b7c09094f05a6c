"""`Probe`: a small program for each kind of work of a device, and the figure that its time gives.

Names of figures are those that `rehearsal.kernel_speeds` looks up: `product bf16 4096`,
`memory copy`, `function exponential`, `irregular sorted`, `kernel cudnn attention forward 128`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.calibration.timing import Input
from meshwright.hardware.chips import Chip
from meshwright.hlo.program import Program
from meshwright.rehearsal.kernel_speeds import SUSTAINED_SIDE, with_keys
from meshwright.rehearsal.kernels import Kernel, kernels, running

_EIGHT_BIT = frozenset({"h100", "h200", "b200", "gb200"})  # GPUs that multiply fp8


@dataclasses.dataclass(frozen=True)
class Probe:
    """One program: `work` of `unit` in a run, or what the program itself is counted to do.

    `counted` names that: an entry of `Kernel.slow`, or `attention` for cuDNN's kernels. `rounds`,
    if not 0, is how often a tiny thing is done in a run; its time by the clock is the figure.
    `burst`: the figure is that of the fastest runs, before power holds the clock down.
    """

    name: str
    unit: str
    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    work: float = 0.0
    counted: str = ""
    rounds: int = 0
    burst: bool = False

    def chosen(self, program: Program) -> dict[str, float]:
        """The instructions that do what is counted, each with how much of it a run does."""
        chosen = {}
        for kernel, times in self._kernels(program):
            work = kernel.slow.get(self.counted, 0.0)
            if self._is_own(kernel) and kernel.custom is not None:
                work = kernel.flops / with_keys(kernel.custom.keys or 1024)
            if work:
                chosen[kernel.name] = work * times
        return chosen

    def aside(self, program: Program, copied: float, start: float) -> float:
        """Seconds of a run that are not the figure's: a sort's start, cuDNN's other kernels.

        `copied`: bytes a second of a copy, which is how those move theirs.
        """
        if self.counted.startswith("sorted"):
            return start
        return sum(
            kernel.custom.apart * times / copied
            for kernel, times in self._kernels(program)
            if self._is_own(kernel) and kernel.custom is not None
        )

    def _is_own(self, kernel: Kernel) -> bool:
        """Whether it is the kernel of attention that the figure is of."""
        speed = kernel.custom.speed if kernel.custom is not None else ""
        return self.counted == "attention" and bool(speed) and self.name.endswith(speed)

    @staticmethod
    def _kernels(program: Program) -> Iterator[tuple[Kernel, int]]:
        for computation in running(program):
            times = program.run_count(computation.name).count
            for kernel in kernels(program, computation):
                yield kernel, times


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the programs are: by the chip and by the time there is."""

    sides: tuple[int, ...]
    elements: int
    functions: int
    sorted: int

    @classmethod
    def of(cls, chip: Chip, quick: bool) -> Sizes:
        if chip.family == "cpu":
            if quick:
                return cls((128, 256), 2**17, 2**12, 2**12)
            return cls((128, 256, 512, 1024), 2**20, 2**14, 2**14)
        # Large enough to leave every cache, at most a sixteenth of the memory.
        elements = min(2**28, int(chip.memory_gb / chip.cores * 1e9) // 64)
        elements = 1 << (elements.bit_length() - 1)
        if quick:
            return cls((1024, 4096, 8192), min(elements, 2**26), 2**24, 2**22)
        return cls((512, 1024, 2048, 4096, 8192, 16384), elements, 2**24, 2**24)


def parts(chip: Chip, quick: bool) -> Mapping[str, tuple[list[Probe], float]]:
    """The probes of a chip in parts, each with the seconds that it may take."""
    sizes = Sizes.of(chip, quick)
    listed: dict[str, tuple[list[Probe], float]] = {
        "products": (list(_products(sizes.sides, chip, quick)), 15.0 if quick else 60.0),
        "memory": (list(_memory(sizes.elements)), 10.0 if quick else 40.0),
        "launches": (list(_launches()), 5.0 if quick else 20.0),
        "functions": (list(_functions(sizes.functions, quick)), 10.0 if quick else 30.0),
    }
    # The compiler of a TPU works on one sort of 2^22 keys for a minute (libtpu 0.0.42), and the
    # model of its kernels has no use for the figure.
    if chip.family != "tpu":
        listed["irregular"] = (list(_irregular(sizes, chip)), 10.0 if quick else 30.0)
    if chip.family != "cpu" and not quick:
        listed["eight-bit"] = (list(_eight_bit(chip, sizes.sides)), 120.0)
    if chip.family == "gpu":
        listed["attention"] = (list(_attention(quick)), 15.0 if quick else 60.0)
    return listed


def _products(sides: tuple[int, ...], chip: Chip, quick: bool) -> Iterator[Probe]:
    for name, dtype in (("bf16", jnp.bfloat16), ("f32", jnp.float32)):
        for side in sides:
            inputs = (Input((side, side), dtype, normal=True),) * 2
            work = 2.0 * side**3
            burst = chip.family == "gpu"
            name_of = f"product {name} {side}"
            yield Probe(name_of, "FLOP/s", jnp.matmul, inputs, work, burst=burst)
        if chip.family == "gpu":
            side, times = SUSTAINED_SIDE, 100 if quick else 400
            inputs = (Input((side, side), dtype),) * 2
            work = 2.0 * side**3 * times
            yield Probe(f"sustained {name}", "FLOP/s", _in_a_loop(side, times), inputs, work)


def _in_a_loop(side: int, times: int) -> Callable[..., Any]:
    """Products one after the other, for as long as it takes until power holds the clock down."""

    def products(x: jax.Array, w: jax.Array) -> jax.Array:
        # Numbers around 0 that keep their size: products of others need less power.
        scale = jnp.asarray((12 / side) ** 0.5, x.dtype)
        x, w = x - jnp.asarray(0.5, x.dtype), (w - jnp.asarray(0.5, w.dtype)) * scale
        result: jax.Array = jax.lax.fori_loop(0, times, lambda _, x: x @ w, x)
        return result

    return products


def _eight_bit(chip: Chip, sides: tuple[int, ...]) -> Iterator[Probe]:
    # Autotuning takes up to a minute a size on GPUs: the large ones say most, and come first.
    dtypes = [("s8", jnp.int8, jnp.int32)]
    if chip.name in _EIGHT_BIT:
        dtypes.insert(0, ("f8e4m3fn", jnp.float8_e4m3fn, jnp.bfloat16))
    for side in [each for each in (8192, 4096, 2048) if each in sides]:
        for name, dtype, result in dtypes:
            inputs = (Input((side, side), dtype, normal=True),) * 2
            yield Probe(
                *(f"product {name} {side}", "FLOP/s", _rows_by_rows(result), inputs),
                work=2.0 * side**3,
                burst=chip.family == "gpu",
            )


def _rows_by_rows(result: Any) -> Callable[..., Any]:
    """Products of rows by rows: the order in which libraries take 8-bit operands."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=result)

    return product


def _memory(n: int) -> Iterator[Probe]:
    flat, rows = Input((n,)), Input((n // 1024, 1024))
    half = Input((n,), jnp.bfloat16)
    yield Probe("memory copy", "B/s", lambda x: x + 1, (flat,), 8.0 * n)
    yield Probe("memory read", "B/s", lambda x: x.sum(-1), (rows,), 4.0 * n)
    yield Probe("memory write", "B/s", lambda x: jnp.broadcast_to(x[:1], (n,)), (flat,), 4.0 * n)
    yield Probe("memory transposed", "B/s", lambda x: x.T + 1, (rows,), 8.0 * n)
    yield Probe("memory summed up", "B/s", lambda x: jnp.cumsum(x, -1), (rows,), 8.0 * n)
    yield Probe(
        "memory row maximum",
        "B/s",
        lambda x: jax.nn.softmax(x.reshape(-1, 1024), -1),
        (half,),
        4.0 * n,
    )
    mask = Input((1,), jnp.int32, high=2)
    yield Probe("loop fusion", "elements/s", _mask(n), (mask,), float(n))


def _mask(n: int) -> Callable[..., Any]:
    # Reads next to nothing and writes a byte each: what limits it are its elements.
    def mask(first: jax.Array) -> jax.Array:
        return jnp.arange(n) >= first

    return mask


_TINY = 256
_apart: Any = jax.lax.optimization_barrier  # no two become one kernel


def _launches() -> Iterator[Probe]:
    tiny = (Input((_TINY,)),)

    def in_a_row(x: jax.Array) -> jax.Array:
        for i in range(_TINY):
            x = _apart(x * 1.0001 + i)
        return x

    def in_a_loop(x: jax.Array) -> Any:
        def body(i: jax.Array, x: jax.Array) -> Any:
            return _apart(x * 1.0001 + i)

        return jax.lax.fori_loop(0, _TINY, body, x)

    yield Probe("start kernel", "s", in_a_row, tiny, rounds=_TINY)
    yield Probe("start iteration", "s", in_a_loop, tiny, rounds=_TINY)


_FUNCTIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "exponential": lambda x: jnp.exp(x) * 0.25,
    "tanh": jnp.tanh,
    "logistic": jax.lax.logistic,
    "rsqrt": lambda x: jax.lax.rsqrt(x + 1.0),
    "divide": lambda x: 1.0 / (x + 1.5),
    "log": lambda x: jnp.log(x + 2.0),
    "sine": jnp.sin,
    "erf": jax.lax.erf,
    "power": lambda x: jnp.power(x + 1.0, 0.7),
    "sqrt": lambda x: jnp.sqrt(x + 1.0),
    "cosine": jnp.cos,
}
_QUICK_FUNCTIONS = ("exponential", "tanh", "rsqrt", "log")
_IN_A_ROW = 32  # so that memory does not bound them


def _functions(n: int, quick: bool) -> Iterator[Probe]:
    for name in _QUICK_FUNCTIONS if quick else _FUNCTIONS:

        def repeated(x: jax.Array, function: Any = _FUNCTIONS[name]) -> jax.Array:
            for _ in range(_IN_A_ROW):
                x = function(x)
            return x

        work = float(n) * _IN_A_ROW
        yield Probe(f"function {name}", "elements/s", repeated, (Input((n,)),), work)


def _irregular(sizes: Sizes, chip: Chip) -> Iterator[Probe]:
    n, table = sizes.sorted, sizes.elements
    small = min(table, 2**20)  # elements of 4 bytes: in every cache
    names: tuple[tuple[str, Callable[..., Any], tuple[Input, ...]], ...] = (
        ("sorted", jnp.sort, (Input((n,)),)),
        ("sorted pairs", jnp.argsort, (Input((n,)),)),
        ("sorted in rows", lambda x: jnp.sort(x, -1), (Input((n // 256, 256)),)),
        ("gathered", _gather, (Input((table,)), _places(n, table))),
        ("gathered in cache", _gather, (Input((small,)), _places(n, small))),
        ("scattered f32", _scatter, _rows(table, n, jnp.float32)),
        ("scattered bf16", _scatter, _rows(table, n, jnp.bfloat16)),
        ("scattered elements", _scatter, (Input((table,)), _places(n, table), Input((n,)))),
        (
            "scattered elements in cache",
            _scatter,
            (Input((small,)), _places(n, small), Input((n,))),
        ),
    )
    if chip.family == "gpu":  # where a library sorts long rows
        rows = Input((max(1, n // 16384), 16384))
        names = (*names, ("sorted in long rows", lambda x: jnp.sort(x, -1), (rows,)))
    for name, function, inputs in names:
        yield Probe(f"irregular {name}", "elements/s", function, inputs, counted=name)


def _places(count: int, below: int) -> Input:
    return Input((count,), jnp.int32, high=below)


def _rows(table: int, n: int, dtype: Any) -> tuple[Input, ...]:
    rows, updates = max(1, table // 1024), max(1, n // 64)
    return Input((rows, 1024), dtype), _places(updates, rows), Input((updates, 1024), dtype)


def _gather(table: jax.Array, places: jax.Array) -> jax.Array:
    return table[places]


def _scatter(table: jax.Array, places: jax.Array, rows: jax.Array) -> jax.Array:
    return table.at[places].add(rows)


def _attention(quick: bool) -> Iterator[Probe]:
    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def backward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.grad(lambda *args: forward(*args).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    for head in (128,) if quick else (128, 64):
        inputs = (Input((4, 4096, 16, head), jnp.bfloat16),) * 3
        for name, function in (("forward", forward), ("backward", backward)):
            figure = f"kernel cudnn attention {name} {head}"
            yield Probe(figure, "FLOP/s", function, inputs, counted="attention")
