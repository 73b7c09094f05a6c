"""Real compiles on simulated devices, with answers worked out by hand."""

import jax
import jax.numpy as jnp
from collectives_helpers import compiled_collectives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw


def shaped(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def constrained(mesh, x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def test_an_fsdp_matmul_gathers_the_weights():
    mesh = mw.mesh("fsdp:8")

    def matmul(x, w):
        w = constrained(mesh, w, None, None)
        return constrained(mesh, x @ w, "fsdp", None)

    args = (shaped(mesh, (4096, 64), "fsdp"), shaped(mesh, (64, 32), "fsdp"))
    (entry,) = compiled_collectives(matmul, args, mesh)
    assert (entry.kind, entry.over, entry.cause) == ("all-gather", "fsdp", "parameter gathers")
    assert entry.bytes == 64 * 32 * 4
    assert entry.moved == 64 * 32 * 4 * 7 // 8
    assert entry.why == "gathers w"
    assert entry.source.file == __file__


def test_a_gather_in_a_loop_is_counted_every_round():
    mesh = mw.mesh("fsdp:8")

    def layers(x, stack):
        def layer(x, w):
            w = constrained(mesh, w, None, None)
            return constrained(mesh, jnp.tanh(x @ w), "fsdp", None), None

        return jax.lax.scan(layer, x, stack)[0]

    args = (shaped(mesh, (4096, 64), "fsdp"), shaped(mesh, (5, 64, 64), None, "fsdp"))
    (entry,) = compiled_collectives(layers, args, mesh)
    assert (entry.kind, entry.bytes, entry.times.count) == ("all-gather", 64 * 64 * 4, 5)
    assert (entry.cause, entry.why) == ("parameter gathers", "gathers stack")
    assert entry.total_moved == 5 * 64 * 64 * 4 * 7 // 8


def test_a_tensor_parallel_pair_is_one_all_reduce():
    mesh = mw.mesh("dp:2, tp:4")

    def pair(x, up, down):
        return jnp.maximum(x @ up, 0) @ down

    args = (
        shaped(mesh, (16, 32), "dp"),
        shaped(mesh, (32, 64), None, "tp"),
        shaped(mesh, (64, 32), "tp", None),
    )
    (entry,) = compiled_collectives(pair, args, mesh)
    assert (entry.kind, entry.over, entry.group_size) == ("all-reduce", "tp", 4)
    assert entry.bytes == 8 * 32 * 4
    assert entry.moved == 2 * 8 * 32 * 4 * 3 // 4
    assert entry.cause == "activation exchanges"


def test_data_parallel_gradients_are_an_all_reduce_of_all_parameters():
    mesh = mw.mesh("dp:8")

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"])

    params = {"a": shaped(mesh, (32, 48)), "b": shaped(mesh, (48, 16))}
    entries = compiled_collectives(jax.grad(loss), (params, shaped(mesh, (64, 32), "dp")), mesh)
    assert {entry.kind for entry in entries} == {"all-reduce"}
    assert {entry.cause for entry in entries} == {"gradient sums"}
    assert sum(entry.bytes for entry in entries) == (32 * 48 + 48 * 16) * 4
    assert {entry.over for entry in entries} == {"dp"}


def test_an_axis_moved_between_dims_is_an_all_to_all():
    mesh = mw.mesh("dp:2, tp:4")

    def move(x):
        return constrained(mesh, x, None, "tp")

    (entry,) = compiled_collectives(move, (shaped(mesh, (32, 64), "tp", None),), mesh)
    assert (entry.kind, entry.over) == ("all-to-all", "tp")
    assert entry.bytes == 32 * 64 * 4 // 4
    assert entry.moved == entry.bytes * 3 // 4


def test_groups_that_are_not_contiguous_are_named():
    mesh = mw.mesh("dp:2, fsdp:2, tp:2")

    def sums(x):
        return jax.shard_map(
            lambda x: (
                jax.lax.psum(x, "fsdp"),
                jax.lax.psum(2 * x, ("dp", "tp")),
                jax.lax.ppermute(x, "dp", [(0, 1), (1, 0)]),
            ),
            mesh=mesh,
            in_specs=P(("dp", "fsdp", "tp")),
            out_specs=P(("dp", "fsdp", "tp")),
            check_vma=False,
        )(x)

    entries = compiled_collectives(sums, (shaped(mesh, (64,), ("dp", "fsdp", "tp")),), mesh)
    assert sorted((entry.kind, entry.over) for entry in entries) == [
        ("all-reduce", "dp, tp"),
        ("all-reduce", "fsdp"),
        ("collective-permute", "dp"),
    ]
    assert {entry.bytes for entry in entries} == {8 * 4}
    (permute,) = [entry for entry in entries if entry.kind == "collective-permute"]
    assert (permute.cause, permute.why) == ("activation exchanges", "asked for by ppermute")


def test_a_program_that_moves_nothing_says_so():
    mesh = mw.mesh("dp:8")
    entries = compiled_collectives(jnp.sin, (shaped(mesh, (64,), "dp"),), mesh)
    assert len(entries) == 0
    assert str(entries) == "no collectives: nothing moves between devices"
