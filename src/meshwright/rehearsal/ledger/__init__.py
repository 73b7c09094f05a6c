"""Every collective of a program: what it moves, over which axes and links, why, from where."""

from meshwright.rehearsal.ledger.clashes import Clash, read_clashes
from meshwright.rehearsal.ledger.collective import Collective, Ledger
from meshwright.rehearsal.ledger.entering import ledger

__all__ = ["Clash", "Collective", "Ledger", "ledger", "read_clashes"]
