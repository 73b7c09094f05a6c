"""Exchange texts between all processes of a job, through JAX's coordination service.

The service is a key-value store that process 0 hosts, so nothing here touches a device, and a
process that holds none of the data can take part. The n-th call of one process for a purpose
meets the n-th call of every other one: all must call in the same order. `Exchange` instead
goes on in the background: each process publishes its newest text and reads those of the others.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from meshwright import _compat

S = TypeVar("S")
F = TypeVar("F")
Combine = Callable[[Sequence[str]], str]

# The store wants a number. A caller without a timeout has a watchdog that ends the process.
_WEEK = 60 * 60 * 24 * 7.0
_FAREWELL = 5.0  # seconds for the others to come where they are told of a failure
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


class Interrupted(Exception):
    """Some processes got Ctrl-C, or failed with a problem; if none is named, some are silent."""

    def __init__(self, processes: Sequence[int] = (), problem: str = "") -> None:
        self.processes, self.problem = tuple(processes), problem
        who = f"process {', '.join(map(str, self.processes))}"
        what = f"{who} failed: {problem}" if problem else f"{who} was interrupted (Ctrl-C)"
        super().__init__(what if processes else "a process of the job did not answer in time")


# Where processes run programs together, one that leaves at once lets the others wait in the next
# program, for as long as its collectives may take. So Ctrl-C is only noted, and all leave at the
# next point that they agree on; a second one ends the process at once.
class Together:
    """Lets processes go on point by point, and end at the same one when some get Ctrl-C.

    A process alone is interrupted as usual.

    >>> with Together("calibrate", timeout=60.0) as together:
    ...     together.agree(0.5)
    0.5
    """

    def __init__(self, purpose: str, timeout: float) -> None:
        self._purpose, self._timeout = purpose, timeout
        self._previous: Any = None
        self.asked = False

    def agree(self, value: float = 0.0) -> float:
        """Return the largest value of all processes; raise `Interrupted` in all of them."""
        text = json.dumps([value, self.asked, ""])
        answer = combine_texts(self._purpose, text, _agreed, timeout=self._timeout)
        if not answer:
            raise Interrupted
        largest, processes, problem = json.loads(answer)
        if processes:
            raise Interrupted(processes, problem)
        return float(largest)

    def fail(self, problem: Exception) -> None:
        """Tell the others, at the point that they come to next, that this process gives up."""
        line = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        here = _compat.coordination_place()[0]
        combine_texts(
            self._purpose,
            json.dumps([0.0, False, line]),
            _agreed,
            timeout=_FAREWELL,
            on_absent=lambda _: json.dumps([0.0, [here], line]),  # for those that come later
        )

    def go_on(self, value: float = 0.0) -> float:
        """Return the value; raise `KeyboardInterrupt` if this process has been interrupted."""
        if self.asked:
            raise KeyboardInterrupt
        return value

    def __enter__(self) -> Together:
        several = _compat.coordination_client() is not None and _compat.coordination_place()[1] > 1
        main = threading.current_thread() is threading.main_thread()
        # A handler of the user's own is left alone.
        if several and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _note(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def _agreed(texts: Sequence[str]) -> str:
    values, asked, problems = zip(*map(json.loads, texts), strict=True)
    if failed := [number for number, problem in enumerate(problems) if problem]:
        return json.dumps([0.0, failed[:1], problems[failed[0]]])
    return json.dumps([max(values), [number for number, each in enumerate(asked) if each], ""])


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


# A call to the store may block for as long as the service is silent, so an `Exchange` makes all
# of its calls in a thread of its own.
#
# Process 0 reads the texts of all. With many processes the others read only what process 0
# publishes, so that the traffic grows with their number, not with its square: process 0 publishes
# under <prefix>/news, where the final text is too, the others under <prefix>/states.

EXCHANGE_EVERY = 0.2
_POLL_EVERY = 0.01
_FEW_PROCESSES = 16  # up to here all read everything


@dataclasses.dataclass(frozen=True)
class Snapshot(Generic[S, F]):
    """What the store held at one time; `number` counts the snapshots."""

    number: int
    final: F | None
    states: Mapping[int, S]


class Exchange(Generic[S, F]):
    """Publishes this process's state and takes a snapshot of the others', five times a second.

    A state and the final value, of which there is one for all processes, are published as texts.
    `failures` counts the calls to the store that failed in a row.
    """

    def __init__(
        self,
        client: Any,
        prefix: str,
        process: int,
        count: int,
        *,
        next_state: Callable[[], S],
        encode: Callable[[S | F], str],
        decode_state: Callable[[str], S],
        decode_final: Callable[[str], F],
    ) -> None:
        self._client, self._prefix, self._process = client, prefix, process
        self._next_state, self._encode = next_state, encode
        self._decode_state, self._decode_final = decode_state, decode_final
        self.snapshot: Snapshot[S, F] = Snapshot(0, None, {})
        self.failures = 0
        self.read_all = process == 0 or count <= _FEW_PROCESSES
        self._final: F | None = None
        self._now, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="meshwright store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        self._closing = True
        self._now.set()
        self._thread.join(timeout)

    def refresh(self, timeout: float) -> Snapshot[S, F]:
        """Return a snapshot of all states that was begun after this call, or the last one if that
        fails or takes too long."""
        self.read_all = True
        number = self.snapshot.number + 1  # one may be under way, begun earlier
        deadline = time.monotonic() + timeout
        while self.snapshot.number <= number and not self.failures and time.monotonic() < deadline:
            self._now.set()
            time.sleep(_POLL_EVERY)
        return self.snapshot

    def publish_final(self, value: F, timeout: float) -> F:
        """Publish the final value; return the one that was published first, by any process."""
        self._final = value
        return self.refresh(timeout).final or value

    def _run(self) -> None:
        while not self._closing:
            self._now.clear()
            try:
                self._exchange()
                self.failures = 0
            except Exception:
                self.failures += 1
            self._now.wait(EXCHANGE_EVERY)

    def _exchange(self) -> None:
        folder = "news" if self._process == 0 else "states"
        if self._final is not None:
            # A key can be set once: the store keeps the first final value and refuses the others.
            with contextlib.suppress(Exception):
                self._client.key_value_set(f"{self._prefix}/news/final", self._encode(self._final))
        self._client.key_value_set(
            f"{self._prefix}/{folder}/{self._process}",
            self._encode(self._next_state()),
            allow_overwrite=True,
        )
        read_all = self.read_all  # another thread may set it meanwhile
        entries = self._client.key_value_dir_get(
            self._prefix if read_all else f"{self._prefix}/news"
        )
        texts = {key.rpartition("/")[2]: text for key, text in entries}
        final = texts.pop("final", None)
        states = {int(process): self._decode_state(text) for process, text in texts.items()}
        self.snapshot = Snapshot(
            self.snapshot.number + 1,
            None if final is None else self._decode_final(final),
            states if read_all else {**self.snapshot.states, **states},
        )


class LocalStore:
    """The part of the service's client that `Exchange` uses, for a job of one process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def key_value_set(self, key: str, text: str, *, allow_overwrite: bool = False) -> None:
        if allow_overwrite or key not in self._texts:
            self._texts[key] = text

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, text) for key, text in self._texts.items() if key.startswith(prefix)]
