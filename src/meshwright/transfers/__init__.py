"""Arrays on the move. In: arrays and where they shall lie. Out: the arrays there.

`shard`, `init` and `reshard` work on trees. A `Route` knows, before anything moves, which device
gives which piece to which; a `Link` moves arrays along routes between groups: inside a process,
pulled by the receiver under a key, or put in one order.
"""

from meshwright.transfers.connection import allow_puts as allow_puts
from meshwright.transfers.connection import connect as connect
from meshwright.transfers.links import Link as Link
from meshwright.transfers.routes import Route as Route
from meshwright.transfers.routes import route as route
