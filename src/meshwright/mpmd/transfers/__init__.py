"""In: arrays in one group, shardings of another. Out: the same arrays there, by the way that fits.

A `Route` knows, before anything moves, which device gives which piece to which. A `Link` moves
arrays along routes: inside a process, pulled by the receiver under a key, or put in one order.
"""

from __future__ import annotations

from meshwright.mpmd.transfers.addresses import allow_puts
from meshwright.mpmd.transfers.connecting import connect
from meshwright.mpmd.transfers.links import Link
from meshwright.mpmd.transfers.routes import Route, route

__all__ = ["Link", "Route", "allow_puts", "connect", "route"]
