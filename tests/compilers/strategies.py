"""Reading the TPU compiler's choice of collective algorithm off its compiled text.

Run as a script it prints the table of docs/cost_model.md:

    python tests/compilers/strategies.py
"""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.hardware.topology import Topology
from meshwright.placement.cost_model import Part, choose_order, offsets
from meshwright.placement.placement import Placement
from meshwright.placement.placer import measure
from meshwright.spec.mesh_spec import MeshSpec

ELEMENTS = 1 << 26

X, Y, Z = 0, 1, 2
# (hardware, the layouts of one axis, all of one size): every pair of them is compared.
LAYOUTS = [
    ("v5e:16x16", [[(X, 4, 1)], [(X, 2, 1), (Y, 2, 1)], [(X, 4, 4)]]),
    ("v5e:16x16", [[(X, 16, 1)], [(X, 4, 1), (Y, 4, 1)], [(X, 8, 2), (Y, 2, 1)]]),
    ("v5p:4x4x4", [[(X, 4, 1)], [(X, 2, 1), (Y, 2, 1)], [(X, 2, 2), (Z, 2, 1)]]),
    ("v5p:4x4x4", [[(X, 4, 1), (Y, 4, 1)], [(X, 2, 1), (Y, 2, 1), (Z, 4, 1)]]),
    ("v5p:8x8x8", [[(X, 8, 1), (Y, 8, 1)], [(X, 4, 1), (Y, 4, 1), (Z, 4, 1)]]),
    ("v5p:4x4x8", [[(X, 4, 1), (Z, 8, 1)], [(X, 4, 1), (Y, 4, 1), (Z, 2, 1)]]),
    ("v6e:8x16", [[(Y, 16, 1)], [(X, 4, 1), (Y, 4, 1)], [(X, 8, 1), (Y, 2, 1)]]),
]


def compiled_text(mesh: Mesh, axis: str, kind: str) -> str:
    """An all-reduce or all-gather over one axis, compiled for the mesh's devices."""
    gather = kind == "all_gather"

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, axis, tiled=True) if gather else jax.lax.psum(x, axis)

    spec = P(axis) if gather else P()
    step = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    x = jax.ShapeDtypeStruct((ELEMENTS,), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    return jax.jit(step).lower(x).compile().as_text()


def strategy(mesh: Mesh, axis: str, kind: str) -> tuple[str, str, int]:
    """Emitter, strategy and colours of the one collective in the program."""
    text = compiled_text(mesh, axis, kind)
    found = re.search(r'"collective_algorithm_config":(\{.*?\}),"used_scoped', text)
    assert found, "the compiler no longer says which algorithm it picked"
    config = json.loads(found[1])
    colours = re.search(r"colors:(\d+)", config.get("debug", ""))
    return config["emitter"], config.get("strategy", ""), int(colours[1]) if colours else 0


def lanes(mesh: Mesh, axis: str) -> int:
    """How many links of a chip an all-reduce drives at once, in one sense each.

    `UniDirection...` strategies send one way per colour; the others send both ways at once.
    """
    _, name, colours = strategy(mesh, axis, "all_reduce")
    return colours if name.startswith("UniDirection") else 2 * colours


def gathered_directions(mesh: Mesh, axis: str) -> int:
    """Over how many torus directions at once an all-gather runs (0 where it does not say)."""
    emitter, _, _ = strategy(mesh, axis, "all_gather")
    number = re.match(r"(\d)DAllGather", emitter)
    return int(number[1]) if number else 0


def laid_out_by_hand(topology: Topology, layout: list[tuple[int, int, int]]) -> Placement:
    """One axis made of the given (direction, factor, stride) pieces, the rest as a second one."""
    parts = tuple(Part(*part) for part in layout)
    along = offsets(topology, parts, choose_order(topology, parts, "axis", "auto"))
    starts, covered = [], np.zeros(topology.num_devices, bool)
    for point in range(topology.num_devices):
        if not covered[point]:
            starts.append(point)
            covered[point + along] = True
    points = np.add.outer(along, np.array(starts))
    spec = MeshSpec.parse([("axis", along.size), ("rest", len(starts))])
    return measure(spec, topology, topology.index.ravel()[points])


def main() -> None:
    """Our bandwidth beside the compiler's choice, for every layout."""
    from meshwright.meshes.build import build_mesh
    from meshwright.meshes.devices import target_topology
    from meshwright.placement.placement import made_of

    print(
        "| hardware | axis made of | order | model, GB/s | all-reduce | links driven | all-gather |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, layouts in LAYOUTS:
        for layout in layouts:
            placed = laid_out_by_hand(target_topology(name, None, 1), layout)
            mesh, axis = build_mesh(placed), placed.axes[0]
            _, reduce, _ = strategy(mesh, "axis", "all_reduce")
            gather, _, _ = strategy(mesh, "axis", "all_gather")
            made = made_of(placed.topology, axis)
            print(
                f"| {name} | {made} | {axis.order} | {axis.cost.bandwidth:g} | {reduce} | "
                f"{lanes(mesh, 'axis')} | {gather} |"
            )


if __name__ == "__main__":
    main()
