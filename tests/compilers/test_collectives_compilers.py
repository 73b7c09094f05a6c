"""The collectives against the vendors' real compilers: nothing missed, axes right."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.hlo.program import read_program
from meshwright.rehearsal.collectives.analyze import analyze

pytestmark = pytest.mark.compilers

MACHINES = [
    ("v5e:4x4", 1, "fsdp:4, tp:4"),
    ("v5e:4x4", 1, "tp:4, fsdp:4"),
    ("v5p:2x2x4", 1, "dp:2, fsdp:2, tp:4"),
    ("v6e:4x4", 1, "dp:2, fsdp:2, tp:4"),
    ("v5e:2x2", 2, "dp:2, tp:4"),
    ("v5e:2x2", 4, "dp:2, fsdp:2, tp:4"),
    ("v5e:4x4", 2, "dp:2, fsdp:4, tp:4"),
    ("h100:8", 1, "fsdp:2, tp:4"),
    ("h100:8x2", 1, "dp:2, fsdp:2, tp:4"),
]
LAYERS, WIDTH, WORDS, BATCH, LENGTH = 3, 256, 512, 32, 64
# Every instruction that moves data between devices, in any of its forms.
INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%([\w.-]+) = .*? (?:(?:all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"ragged-all-to-all|collective-permute|collective-broadcast)(?:-start|-done)?"
    r"|send|recv|send-done|recv-done)\(",
    re.M,
)


def layer(x, w):
    return x + jax.nn.relu(x @ w["up"]) @ w["down"], None


def loss(params, words):
    x = params["words"][words]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jax.nn.logsumexp((x @ params["words"].T).astype(jnp.float32), -1).mean()


def step(params, words):
    value, grads = jax.value_and_grad(loss)(params, words)
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads), value


@functools.cache
def compiled(on, slices, spec):
    mesh = mw.mesh(spec, on=on, slices=slices)
    names = mesh.axis_names

    def shaped(shape, *axes, dtype=jnp.bfloat16):
        known = P(*(axis if axis in names else None for axis in axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, known))

    data = tuple(name for name in names if name in ("dp", "fsdp"))
    params = {
        "words": shaped((WORDS, WIDTH), "tp", "fsdp"),
        "layers": {
            "up": shaped((LAYERS, WIDTH, 4 * WIDTH), None, "fsdp", "tp"),
            "down": shaped((LAYERS, 4 * WIDTH, WIDTH), None, "tp", "fsdp"),
        },
    }
    words = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=NamedSharding(mesh, P(data)))
    text = jax.jit(step, donate_argnums=0).lower(params, words).compile().as_text()
    return text, mesh


@pytest.mark.parametrize(("on", "slices", "spec"), MACHINES)
def test_every_collective_instruction_is_accounted_for(on, slices, spec):
    text, mesh = compiled(on, slices, spec)
    found = analyze(read_program(text), mw.explain(mesh))
    entered = [name for entry in found for name in entry.instructions]
    assert sorted(entered) == sorted(INSTRUCTION.findall(text))
    assert len(found) > 3


@pytest.mark.parametrize(("on", "slices", "spec"), MACHINES)
def test_entries_make_sense(on, slices, spec):
    text, mesh = compiled(on, slices, spec)
    program = read_program(text)
    found = analyze(program, mw.explain(mesh))
    assert not any(entry.times.at_least for entry in found), "a loop's rounds were not found"
    assert all(entry.seconds > 0 for entry in found if entry.moved)
    assert all(entry.axes is not None for entry in found)
    inside = [e for e in found if e.times.count % LAYERS == 0 and e.kind == "all-reduce"]
    assert any(e.over == "tp" for e in inside), "no sum over tp in the layers"
    assert all(len(line) <= 100 for line in str(found).splitlines())


@pytest.mark.parametrize(("on", "slices", "spec"), MACHINES)
def test_operations_are_those_counted_by_hand(on, slices, spec):
    text, mesh = compiled(on, slices, spec)
    tokens = BATCH * LENGTH
    once = 2 * tokens * WIDTH * 4 * WIDTH
    # Two dots a layer, forward once and backward twice each, and the first of them again for the
    # checkpoint; the last one, against the words, forward and backward.
    everything = LAYERS * 7 * once + 3 * 2 * tokens * WIDTH * WORDS
    assert read_program(text).flops * mesh.size == pytest.approx(everything, rel=0.02)


def one_collective(mesh, axes):
    def body(x):
        return jax.lax.psum(x, axes)

    every = P(mesh.axis_names)
    fn = jax.shard_map(body, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    x = jax.ShapeDtypeStruct((mesh.size * 2048,), jnp.float32, sharding=NamedSharding(mesh, every))
    text = jax.jit(fn).lower(x).compile().as_text()
    return analyze(read_program(text), mw.explain(mesh))


@pytest.mark.parametrize("axes", [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")])
@pytest.mark.parametrize("on", ["v5e:4x4", "v5p:2x2x4", "h100:8x2"])
def test_axes_are_named_whatever_the_groups_look_like(on, axes):
    mesh = mw.mesh("a:2, b:4, c:2", on=on)
    (entry,) = one_collective(mesh, axes)
    assert tuple(part.name for part in entry.axes) == axes
    assert all(part.whole for part in entry.axes)
    assert (entry.kind, entry.bytes) == ("all-reduce", 2048 * 4)


@pytest.mark.parametrize("spec", ["a:2, dp:2, b:2", "dp:2, a:2, b:2", "a:2, b:2, dp:2"])
def test_axes_inside_and_between_slices_are_named(spec):
    mesh = mw.mesh(spec, on="v5e:2x2", slices=2, dcn={"dp": 2})
    (inside,) = one_collective(mesh, ("b",))
    assert (inside.over, inside.links) == ("b", "ICI line")
    (between,) = one_collective(mesh, ("dp",))
    assert (between.kind, between.over, between.links) == ("all-reduce", "dp", "network")


def test_device_numbers_of_slices_are_known():
    from meshwright.rehearsal.collectives.analyze import Positions

    for on in ("v5e:4x4", "v5p:2x4x4", "tpu7x:2x2x4"):
        mesh = mw.mesh("dp:2, tp:-1", on=on, slices=2)
        ids = [device.id for device in mesh.devices.flat]
        found = Positions(mw.explain(mesh), mesh.size).of_device_ids(ids)
        assert found.tolist() == list(range(mesh.size))
