"""Small programs for the tests of the ledger."""

import meshwright as mw
from meshwright.hlo.program import read_program
from meshwright.rehearsal.collectives.analyze import ledger


def book(lines, *, spec="dp:2, tp:4", on="h100:8", slices=1, before="", devices=8, clashes=()):
    """The ledger of a program whose entry consists of the given lines."""
    body = "\n".join(f"  {line}" for line in lines)
    text = (
        f"HloModule m, num_partitions={devices}\n{before}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
    )
    return ledger(read_program(text), mw.explain(spec, on=on, slices=slices), clashes)


def compiled_book(fn, args, mesh, clashes=()):
    """The ledger of a function compiled for a mesh."""
    import jax

    text = jax.jit(fn).lower(*args).compile().as_text()
    return ledger(read_program(text), mw.explain(mesh), clashes)
