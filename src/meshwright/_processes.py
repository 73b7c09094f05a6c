"""Exchange a text between all processes of a job, through JAX's coordination service.

The service is a key-value store that process 0 hosts, so nothing here touches a device, and a
process that holds none of the data can take part. The n-th call of one process for a purpose
meets the n-th call of every other one: all must call in the same order.
"""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from meshwright import _compat

Combine = Callable[[Sequence[str]], str]

# The store wants a number. A caller without a timeout has a watchdog that ends the process.
_WEEK = 60 * 60 * 24 * 7.0
_calls: collections.Counter[str] = collections.Counter()


def combine_texts(
    purpose: str,
    text: str,
    combine: Combine,
    *,
    timeout: float = math.inf,
    on_absent: Callable[[Sequence[int]], str] = lambda processes: "",
    on_wait: Callable[[int], None] = lambda process: None,
) -> str | None:
    """Give process 0 this process's text; return what `combine` makes there of all of them.

    `combine` runs in process 0 alone, with the texts by process; its answer is everyone's. If some
    did not call within `timeout` seconds, the answer is what `on_absent` makes of their numbers;
    it is `None` if process 0 itself gave none in time. Traffic grows with the number of processes,
    not with its square. `on_wait(process)` is called before waiting for that process.
    """
    client = _compat.coordination_client()
    process, count = _compat.coordination_place()
    if client is None or count == 1:
        return combine([text])
    prefix = _next_prefix(purpose)
    if process:
        client.key_value_set(f"{prefix}/{process}", text)
        on_wait(0)
        # Process 0 may itself wait that long for another process before it answers.
        return _read(client, f"{prefix}/answer", _deadline(2 * timeout))
    texts = {0: text}
    deadline = _deadline(timeout)
    for other in range(1, count):
        on_wait(other)
        if (given := _read(client, f"{prefix}/{other}", deadline)) is not None:
            texts[other] = given
    absent = [other for other in range(count) if other not in texts]
    answer = on_absent(absent) if absent else combine(list(texts.values()))
    client.key_value_set(f"{prefix}/answer", answer)
    return answer


def gather_texts(
    purpose: str, text: str, processes: Sequence[int], *, timeout: float
) -> Mapping[int, str | None]:
    """Return the texts of `processes`, this one among them; `None` for who did not call in time.

    Only `processes` take part. If one is absent, this process's text is withdrawn again.
    """
    client = _compat.coordination_client()
    process, _ = _compat.coordination_place()
    members = ",".join(map(str, processes))
    prefix = _next_prefix(f"{purpose}/{members}")
    client.key_value_set(f"{prefix}/{process}", text, allow_overwrite=True)
    deadline = _deadline(timeout)
    texts = {other: _read(client, f"{prefix}/{other}", deadline) for other in processes}
    if None in texts.values():
        client.key_value_delete(f"{prefix}/{process}")
        # An absent process has not counted this call: the next call here must meet its first.
        _calls[f"{purpose}/{members}"] -= 1
    return texts


@contextlib.contextmanager
def fail_together(purpose: str, error: type[Exception]) -> Iterator[None]:
    """Run the block in all processes; if it raises in one, raise in all, with the same text.

    A process whose own block raised keeps its exception; the others raise `error` with the text of
    the first one that failed. So no process goes on to wait for one that has given up.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as raised:
        problem = raised
    text = str(problem) or repr(problem) if problem else ""
    first = combine_texts(purpose, text, lambda texts: next((t for t in texts if t), ""))
    if problem is not None:
        raise problem
    if first:
        raise error(first)


def _next_prefix(purpose: str) -> str:
    """Return the prefix of this call's keys; delete the keys of the call before the last."""
    call = _calls[purpose]
    _calls[purpose] += 1
    client = _compat.coordination_client()
    if call > 1 and _compat.coordination_place()[0] == 0:
        # A process that has begun the last call has read everything of the call before it.
        client.key_value_delete(f"meshwright/{purpose}/{call - 2}/")
    return f"meshwright/{purpose}/{call}"


def _deadline(timeout: float) -> float:
    return time.monotonic() + min(timeout, _WEEK)


def _read(client: Any, key: str, deadline: float) -> str | None:
    # At least a moment, so that what lies there already is read after the deadline too.
    wait = max(200, int(1000 * (deadline - time.monotonic())))
    try:
        return str(client.blocking_key_value_get(key, wait))
    except jax.errors.JaxRuntimeError:
        return None
