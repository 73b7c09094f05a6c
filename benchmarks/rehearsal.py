"""What rehearsing costs over the bare compile, reading a program, and a cache hit.

python benchmarks/rehearsal.py [MODEL BATCH SEQ MESH HARDWARE]
"""

from __future__ import annotations

import sys
import tempfile
import time

import jax

import meshwright as mw
from meshwright.hlo.program import read_program
from meshwright.meshes.build import placement_of
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.peak import live_buffers
from meshwright.rehearsal.step_arguments import as_shapes
from meshwright.rehearsal.step_time import step_time
from meshwright.spec.mesh_spec import MeshSpec


def bare(name: str, batch: int, seq: int, spec: str, on: str) -> float:
    """Lower and compile, as a user would by hand, in this process."""
    model = mw.models.model(name)
    mesh = mw.mesh(spec, on=on)
    abstract = mesh.abstract_mesh
    state, data = model.shapes(), model.batch(batch, seq)
    specs = mw.partition(state, mesh, rules=model.rules(mesh), unused="allow")
    rows = jax.tree.map(lambda _: model.batch_spec(mesh), data)
    shapes = as_shapes((state, data), (specs, rows), mesh)
    out = jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs)
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(abstract):
        step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(out, None))
        lowered = step.lower(*shapes)
    lowered.compile()
    return time.perf_counter() - began


def main(name: str, batch: int, seq: int, spec: str, on: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    by_hand = bare(name, batch, seq, spec, on)
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        result = mw.rehearse_model(name, batch=batch, seq=seq, mesh=spec, on=on, cache=cache)
        _ = result.time  # with collectives, which are read off the program when asked for
        rehearsed = time.perf_counter() - began
        began = time.perf_counter()
        hit = mw.rehearse_model(name, batch=batch, seq=seq, mesh=spec, on=on, cache=cache)
        _ = hit.time
        again = time.perf_counter() - began
    print(
        f"{name} on {on}: bare lower and compile {by_hand:.1f} s, rehearsed {rehearsed:.1f} s, "
        f"ratio {rehearsed / by_hand:.3f}"
    )
    print(f"the same again, from the cache ({hit.from_cache}): {again:.2f} s")
    placed = placement_of(MeshSpec.parse(spec), mw.topology(on))
    began = time.perf_counter()
    program = read_program(result.text)
    collectives = analyze(program, placed)
    read = time.perf_counter() - began
    live_buffers(program)
    step_time(program, collectives, placed.topology.chip)
    whole = time.perf_counter() - began
    size = len(result.text) / 1e6
    print(
        f"a program of {size:.2f} MB: collectives in {read:.2f} s ({read / size:.2f} s a MB), with "
        f"buffers and time {whole:.2f} s"
    )


if __name__ == "__main__":
    words = sys.argv[1:] or ["llama3-8b", "256", "2048", "fsdp:-1, tp:4", "v5e:16x16"]
    main(words[0], int(words[1]), int(words[2]), words[3], words[4])
