"""Small programs for the tests of the collectives."""

import meshwright as mw
from meshwright.hlo.program import read_program
from meshwright.rehearsal.collectives.analyze import analyze


def collectives_of(
    lines, *, spec="dp:2, tp:4", on="h100:8", slices=1, before="", devices=8, conflicts=()
):
    """The collectives of a program whose entry consists of the given lines."""
    body = "\n".join(f"  {line}" for line in lines)
    text = (
        f"HloModule m, num_partitions={devices}\n{before}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
    )
    return analyze(read_program(text), mw.explain(spec, on=on, slices=slices), conflicts)


def compiled_collectives(fn, args, mesh, conflicts=()):
    """The collectives of a function compiled for a mesh."""
    import jax

    text = jax.jit(fn).lower(*args).compile().as_text()
    return analyze(read_program(text), mw.explain(mesh), conflicts)
