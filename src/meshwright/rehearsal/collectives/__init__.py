"""Every collective of a program. In: optimised HLO, a placement. Out: `Collectives`.

`find` finds them however they are written, `causes` says why each is there, `costs` how long it
takes on which links; `analyze` puts these together, and `types` holds and prints the result.
"""
