"""Move arrays. In: arrays and the shardings they should have. Out: the arrays, sharded so.

On trees: `shard` (`device_put`), `init` (`sharded_init`) and `reshard` (`resharding`, `moves`).
Between groups of devices: `route` plans a transfer once (`routes`), `connect` opens a `Link` that
carries it out any number of times (`execution`, `links`, `cross_process_links`, `connection`).

Both rest on one planner, which is pure: `boxes` says which part of an array each device holds and
where two shardings overlap, `message_plan` which process sends what to which, `transfer_plan` which
device does each step. There is one transport for each kind of connection: copies inside a process,
a collective program (`ppermute_transport`), pulls by key, and puts in one order.
"""

from meshwright._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
