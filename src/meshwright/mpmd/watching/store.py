"""The coordination service's key-value store, in a thread of its own: others never wait for it.

Process 0, which hosts the store, reads what all tell. Of many, the others read only what process 0
tells, so that the traffic grows with the number of processes, not with its square.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.mpmd.watching.states import Fault, State, read_fault, read_state, write

POLL = 0.2
_STEP = 0.01
_FEW = 16


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the store held at one time; `number` counts the readings."""

    number: int
    fault: Fault | None
    states: Mapping[int, State]


class Store:
    """Tells and reads, five times a second. `failures` counts the tries in a row that failed."""

    def __init__(
        self, client: Any, room: str, process: int, count: int, tell: Callable[[], State]
    ) -> None:
        self._client, self._room, self._process, self._tell = client, room, process, tell
        self.reading = Reading(0, None, {})
        self.failures = 0
        self.whole = process == 0 or count <= _FEW
        self._fault: Fault | None = None
        self._now, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="meshwright store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, patience: float) -> None:
        self._closing = True
        self._now.set()
        self._thread.join(patience)

    def refresh(self, patience: float) -> Reading:
        """A whole reading that was begun after this call, or the last there is if it fails."""
        self.whole = True
        number = self.reading.number + 1  # one may be under way
        end = time.monotonic() + patience
        while self.reading.number <= number and not self.failures and time.monotonic() < end:
            self._now.set()
            time.sleep(_STEP)
        return self.reading

    def accuse(self, fault: Fault, patience: float) -> Fault:
        """Tell all of a fault. The first that is told stands; it is returned."""
        self._fault = fault
        return self.refresh(patience).fault or fault

    def _run(self) -> None:
        while not self._closing:
            self._now.clear()
            try:
                self._exchange()
                self.failures = 0
            except Exception:
                self.failures += 1
            self._now.wait(POLL)

    def _exchange(self) -> None:
        part = "news" if self._process == 0 else "states"
        if self._fault is not None:
            with contextlib.suppress(Exception):  # there already
                self._client.key_value_set(f"{self._room}/news/fault", write(self._fault))
        self._client.key_value_set(
            f"{self._room}/{part}/{self._process}", write(self._tell()), allow_overwrite=True
        )
        whole = self.whole
        found = self._client.key_value_dir_get(self._room if whole else f"{self._room}/news")
        texts = {key.rpartition("/")[2]: text for key, text in found}
        fault = texts.pop("fault", None)
        states = {int(process): read_state(text) for process, text in texts.items()}
        self.reading = Reading(
            self.reading.number + 1,
            None if fault is None else read_fault(fault),
            states if whole else {**self.reading.states, **states},
        )
