"""Serve a decoder from two groups of devices: one reads the prompts, the other writes the answers.

python examples/serving.py [--processes 2]

Prefill runs on 4 devices that split the heads, decoding on 4 others that split the requests too;
the cache of keys and values goes from the first group to the second, the answers come back. With
`--processes 2` each group is a process of its own. The answers are those of one device without a
cache, token for token.
"""

from __future__ import annotations

import argparse
import functools
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw

PREFILL, DECODE = "tp:4", "dp:2, tp:2"
BATCHES, ROWS, PROMPT, ANSWER, MOVES = 3, 8, 96, 16, 20
SIZES = {"embed": 128, "heads": 8, "kv_heads": 4, "head": 32, "seq": PROMPT + ANSWER}
MODEL = mw.models.model("tiny", compute="float32", **SIZES)
Cache = dict[str, jax.Array]  # "keys" and "values": (layers, rows, positions, heads, head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--join", type=int, nargs=2, metavar=("PORT", "PROCESS"))
    options = parser.parse_args()
    if options.processes == 2:
        raise SystemExit(start_both())
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 if options.join else 8)
    if options.join:
        port, process = options.join
        at = f"127.0.0.1:{port}"
        # A group is one process, so that no collective crosses: the quick ones inside will do.
        jax.config.update("jax_cpu_collectives_implementation", None)
        jax.distributed.initialize(at, 2, process, coordinator_bind_address=at)
    serve()


def start_both() -> int:
    """Start this file twice; each process finds the other at a port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, __file__, "--join", port]
    both = [subprocess.Popen([*command, str(me)]) for me in range(2)]  # noqa: S603
    return max(abs(process.wait()) for process in both)


# The two halves. In one process both run here, else each in its own.


def serve() -> None:
    devices = jax.devices()
    prefill, decode = (
        mw.mesh(spec, devices=part)
        for spec, part in ((PREFILL, devices[:4]), (DECODE, devices[4:]))
    )
    groups = mw.MeshGroups([prefill, decode])
    mine = {groups.my_mpmd_axis_index} if groups.spans_processes else {0, 1}
    prompts = [MODEL.example(ROWS, PROMPT, seed=seed)["inputs"] for seed in range(BATCHES)]
    # Each process plans both routes, of arrays that it may never hold: shapes will do.
    state = jax.eval_shape(prefill_step, MODEL.shapes()["params"], prompts[0])
    there = mw.transfers.route(state, state_shardings(decode), source=state_shardings(prefill))
    answer = jax.ShapeDtypeStruct((ROWS, ANSWER), jnp.int32)
    ends = NamedSharding(prefill, P()), NamedSharding(decode, P("dp"))
    back = mw.transfers.route(answer, ends[0], source=ends[1])
    if 0 in mine:
        print(f"{groups}\n\n{draw(prefill, decode, there)}\n\n{there}\n")

    # Nothing of `link` waits: while one batch is decoded, the next one is read. The watchdog ends
    # both processes if one fails; before the link closes it waits until both have come to the end.
    with mw.transfers.connect() as link, mw.Watchdog(timeout=120):
        if 0 in mine:
            state = read_prompts(prefill, prompts, lambda state: link.send(there, "cache", state))
        if 1 in mine:
            caches = (link.receive(there, "cache") for _ in prompts)
            write_answers(decode, caches, lambda tokens: link.send(back, "answer", tokens))
        if 0 in mine:
            answers = [link.receive(back, "answer") for _ in prompts]
            check_equal(prompts, [np.asarray(tokens) for tokens in answers])
        measure(link, there, state, mine)


def read_prompts(mesh: Mesh, prompts: list[np.ndarray], send: Any) -> dict[str, Any]:
    """Prefill: a first token for each row, and the cache. Returns what was sent last."""
    params = shard_params(mesh)
    run = jax.jit(prefill_step, out_shardings=state_shardings(mesh))
    for batch in prompts:
        send(state := run(params, mw.shard(batch, mesh, P())))
    return state


def write_answers(mesh: Mesh, states: Any, send: Any) -> None:
    """Decode, a token of each row at a time, in a cache that has room for the whole answer."""
    params = shard_params(mesh)
    cached, tokens = state_shardings(mesh)["cache"], NamedSharding(mesh, P("dp"))
    enlarge = jax.jit(lambda x: jnp.pad(x, [(0, 0)] * 2 + [(0, ANSWER)] + [(0, 0)] * 2))
    run = jax.jit(decode_step, donate_argnums=1, out_shardings=(cached, tokens))
    for state in states:
        cache, token, answer = jax.tree.map(enlarge, state["cache"]), state["token"], []
        for position in range(PROMPT, PROMPT + ANSWER):
            answer.append(np.asarray(token))  # read at once, as a server does that streams them
            cache, token = run(params, cache, token, position)
        send(jax.device_put(np.stack(answer, 1), tokens))


def measure(link: mw.transfers.Link, route: mw.transfers.Route, state: Any, mine: set) -> None:
    """Time moves of a cache that is there already."""
    took = []
    for _ in range(MOVES):
        began = time.perf_counter()
        if 0 in mine:
            link.send(route, "again", jax.block_until_ready(state))
        if 1 in mine:
            jax.block_until_ready(link.receive(route, "again"))
            took.append(time.perf_counter() - began)
    if 1 in mine:
        median, size = statistics.median(took), route.bytes / 2**20
        how = "inside a process" if 0 in mine else "between processes"
        print(
            f"the cache of {ROWS} prompts, {size:.2f} MiB, {how}: {1e3 * median:.1f} ms, "
            f"{size / 1024 / median:.2f} GiB/s (median of {MOVES} moves)",
            flush=True,
        )


def state_shardings(mesh: Mesh) -> dict[str, Any]:
    """What goes from one group to the other, by the axes that a group has."""
    rows = "dp" if "dp" in mesh.axis_names else None
    cached = NamedSharding(mesh, P(None, rows, None, "tp"))
    return {"cache": {"keys": cached, "values": cached}, "token": NamedSharding(mesh, P(rows))}


def shard_params(mesh: Mesh) -> Any:
    return mw.shard(make_params(), mesh, rules=MODEL.rules(mesh))


@functools.cache
def make_params() -> Any:
    return jax.device_get(jax.jit(MODEL.init)(jax.random.key(0)))


# The model's forward pass with a cache, for its parameters as they are.


def prefill_step(params: Any, prompt: jax.Array) -> dict[str, Any]:
    config = MODEL.config
    empty = jnp.zeros((config.layers, *prompt.shape, config.kv_heads, config.head))
    cache, token = forward(params, {"keys": empty, "values": empty}, prompt, 0)
    return {"cache": cache, "token": token}


def decode_step(params: Any, cache: Cache, token: jax.Array, position: Any) -> Any:
    return forward(params, cache, token[:, None], position)


def forward(params: Any, cache: Cache, tokens: jax.Array, start: Any) -> tuple[Cache, jax.Array]:
    """Read tokens from a position on: the cache with theirs in it, and what comes next."""
    positions = start + jnp.arange(tokens.shape[1])
    (stage,) = params["stages"]

    def layer(x: jax.Array, inputs: Any) -> tuple[jax.Array, Cache]:
        weights, cached = inputs
        attention, mlp = weights["attention"], weights["mlp"]
        normed = norm(x, attention["norm"])
        query, key, value = (
            jnp.einsum("bsd,dhk->bshk", normed, attention[name])
            for name in ("query", "key", "value")
        )
        new = {"keys": rotate(key, positions), "values": value}
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        cached = jax.tree.map(write, cached, new)
        seen = jnp.arange(cached["keys"].shape[1]) <= positions[:, None]
        mixed = jax.nn.dot_product_attention(
            rotate(query, positions), cached["keys"], cached["values"], mask=seen[None, None]
        )
        x = x + jnp.einsum("bshk,hkd->bsd", mixed, attention["out"])
        normed = norm(x, mlp["norm"])
        wide = jax.nn.silu(normed @ mlp["gate"]) * (normed @ mlp["up"])
        return x + wide @ mlp["down"], cached

    x, cache = jax.lax.scan(layer, params["embed"]["table"][tokens], (stage, cache))
    logits = norm(x[:, -1], params["head"]["norm"]) @ params["head"]["kernel"]
    return cache, pick(logits, start + tokens.shape[1])


def pick(logits: jax.Array, position: Any) -> jax.Array:
    """Draw tokens by their probability; the same ones for the same position, wherever it is."""
    key = jax.random.fold_in(jax.random.key(1), position)
    noise = jax.random.gumbel(key, logits.shape)
    return jnp.argmax(logits + noise, -1).astype(jnp.int32)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + MODEL.config.eps) * scale


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turn each pair of dims by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * MODEL.config.theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


# One device, no cache: every token from all before it.


def check_equal(prompts: list[np.ndarray], answers: list[np.ndarray]) -> None:
    """Stop unless all answers are those of one device."""
    for prompt, answer in zip(prompts, answers, strict=True):
        if not np.array_equal(answer, expected_answer(prompt)):
            raise SystemExit("the groups' tokens are not those of one device")
    count = sum(answer.size for answer in answers)
    print(f"{len(answers)} batches, {count} tokens: equal to one device's without a cache")
    print(f"the first answer: {' '.join(map(str, answers[0][0]))}\n", flush=True)


def expected_answer(prompt: np.ndarray) -> np.ndarray:
    tokens = np.pad(prompt, [(0, 0), (0, ANSWER)])
    for position in range(PROMPT, PROMPT + ANSWER):
        tokens[:, position] = next_tokens(make_params(), tokens, position)
    return tokens[:, PROMPT:]


@jax.jit
def next_tokens(params: Any, tokens: jax.Array, position: int) -> jax.Array:
    logits, _ = MODEL.logits(params, tokens)
    return pick(logits[:, position - 1], position)


def draw(prefill: Mesh, decode: Mesh, route: mw.transfers.Route) -> str:
    """The two groups as boxes of devices, and what goes between them."""
    left, right = box(prefill), box(decode)
    height, width = max(len(left), len(right)), len(left[0])
    left += [" " * width] * (height - len(left))
    right += [""] * (height - len(right))
    arrow = f"── {route.bytes / 2**20:.2f} MiB ──▶"
    middle = [arrow if row == 1 else " " * len(arrow) for row in range(height)]
    title = f"{f'prefill, {PREFILL}':{width + len(arrow) + 4}}decode, {DECODE}"
    rows = [f"{a}  {b}  {c}".rstrip() for a, b, c in zip(left, middle, right, strict=True)]
    return "\n".join([title, *rows])


def box(mesh: Mesh) -> list[str]:
    rows = np.atleast_2d(mesh.devices)
    width = 2 + max(len(str(device.id)) for device in rows.flat)
    lines = ["│" + "│".join(f"{device.id:^{width}}" for device in row) + "│" for row in rows]
    edge = ["─" * width] * rows.shape[1]
    inner = "├" + "┼".join(edge) + "┤"
    drawn = [line for row in lines for line in (row, inner)][:-1]
    return ["┌" + "┬".join(edge) + "┐", *drawn, "└" + "┴".join(edge) + "┘"]


if __name__ == "__main__":
    main()
