"""`Callback`: what a step would have called on the host, left out of the program that is compiled.

Callbacks need live devices. Without them the program is otherwise the same: those that return
nothing are dropped, the results of the others are taken to be zeros.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from meshwright import _compat, _compat_lowering
from meshwright._show import short_repr
from meshwright._text import plural
from meshwright.errors import RehearsalError, listing
from meshwright.hlo.instructions import Source

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)?( \((?P<function>.*)\))?$")


@dataclasses.dataclass(frozen=True, repr=False)
class Callback:
    """A call from a step to the host: its kind, as users write it after `jax.`, and its line.

    `returns` says whether the step goes on with what it returned, which was taken to be zeros.
    """

    kind: str
    source: Source | None
    returns: bool

    def __str__(self) -> str:
        return f"{self.kind} at {self.source}" if self.source else self.kind

    def __repr__(self) -> str:
        return short_repr(self, str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the kind, the line and whether it returns, as plain data."""
        source = None if self.source is None else str(self.source)
        return {"kind": self.kind, "source": source, "returns": self.returns}


def source_of(eqns: Sequence[_compat.Eqn]) -> Source | None:
    """Return the line of the user's that an equation comes from, or else its callers."""
    for eqn in eqns:
        place = _PLACE.match(_compat.source_line(eqn))
        if place is not None:
            return Source(place["file"], int(place["line"]), place["function"] or "")
    return None


# In: a jaxpr and all that it calls. Out: a `Callback` for each line that calls the host. Invariant:
# those are what lowering leaves out, and it changes nothing else. Example: `jax.debug.print` in the
# body of a scan is one callback, with the user's line, however often it would run.
def find_callbacks(jaxpr: _compat.Jaxpr, devices: int) -> tuple[Callback, ...]:
    """List the callbacks of a program, each line once; refuse those that JAX would refuse too."""
    callbacks: dict[Callback, None] = {}
    ordered: dict[Callback, None] = {}
    for eqn, *callers in _compat_lowering.equations(jaxpr):
        kind = _compat_lowering.callback_kind(eqn)
        if kind:
            one = Callback(kind, source_of([eqn, *callers]), bool(eqn.outvars))
            callbacks[one] = None
            if _compat_lowering.is_refused_on_many_devices(eqn):
                ordered[one] = None
    if ordered and devices > 1:
        raise RehearsalError(
            f"{listing(ordered)}: ordered=True on {devices} devices. JAX refuses ordered effects "
            "on more than one device, on the hardware as well. Pass ordered=False."
        )
    return tuple(callbacks)


def callbacks_line(callbacks: Sequence[Callback]) -> str:
    """Say in a line which callbacks were left out, and what that means for the figures."""
    zeros = (
        " What they return is taken to be zeros." if any(one.returns for one in callbacks) else ""
    )
    return (
        f"{plural(len(callbacks), 'callback')} left out of the program, and of its time: "
        f"{listing(callbacks)}.{zeros}"
    )
