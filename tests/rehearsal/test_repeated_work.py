"""Work that several devices do alike: found in the program, counted, and told by line and axis."""

import base64
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.hlo.program import read_program
from meshwright.rehearsal.repeated_work import find_repeated_work
from meshwright.rehearsal.replication import Replication, sharded_tiles

W = jax.ShapeDtypeStruct((512, 512), "float32")
X = jax.ShapeDtypeStruct((64, 512), "float32")
HALVES = "sharding={devices=[2,1,2]<=[4] last_tile_dim_replicate}"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def read(lines, before="", tables=None):
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule m, num_partitions=4\n\n{before}ENTRY %main () -> f32[] {{\n{body}\n}}\n"
    return read_program(text, tables)


def classes(lines, name, **more):
    program = read(lines, **more)
    return Replication(program).classes(program.entry.by_name[name]).tolist()


INPUTS = [
    f"%x = f32[8,8]{{1,0}} parameter(0), {HALVES}",
    "%w = f32[8,8]{1,0} parameter(1), sharding={replicated}",
    f"%d = f32[8,8]{{1,0}} dot(%x, %w), {DOT}",
]


PAIRS, ROWS = "replica_groups={{0,2},{1,3}}", "replica_groups={{0,1},{2,3}}"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("f32[8,8] add(%d, %d)", [0, 0, 1, 1]),
        ("f32[8,8] add(%w, %w)", [0, 0, 0, 0]),
        (f"f32[16,8] all-gather(%d), {PAIRS}, dimensions={{0}}", [0, 0, 0, 0]),
        (f"f32[16,8] all-gather(%d), {ROWS}, dimensions={{0}}", [0, 0, 1, 1]),
        ("f32[8,8] all-reduce(%d), replica_groups={}, to_apply=%add", [0, 0, 0, 0]),
        (f"f32[4,8] reduce-scatter(%d), {ROWS}, dimensions={{0}}", [0, 1, 2, 3]),
        (f"f32[4,8] reduce-scatter(%w), {ROWS}, dimensions={{0}}", [0, 1, 0, 1]),
        ("f32[8,8] collective-permute(%d), source_target_pairs={{0,1},{1,0}}", [0, 0, 1, 1]),
        ("f32[8,8] recv(%d)", [0, 1, 2, 3]),
        ('f32[8,8] custom-call(%w), custom_call_target="k"', [0, 0, 0, 0]),
    ],
)
def test_devices_are_told_apart_by_shards_and_collectives(result, expected):
    add = "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
    add += "  %b = f32[] parameter(1)\n  ROOT %s = f32[] add(%a, %b)\n}\n\n"
    assert classes([*INPUTS, f"ROOT %r = {result}"], "r", before=add) == expected


def test_a_devices_own_number_tells_it_apart_as_far_as_its_table_does():
    lines = [
        *INPUTS,
        "%table = s32[4]{0} constant({...})",
        "%id = u32[] partition-id()",
        "%at = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}",
        "%start = s32[] reshape(%at)",
        "%zero = s32[] constant(0)",
        "ROOT %r = f32[4,8] dynamic-slice(%w, %start, %zero), dynamic_slice_sizes={4,8}",
    ]
    values = base64.b64encode(np.array([0, 4, 0, 4], np.int32).tobytes()).decode()
    assert classes(lines, "r", tables={"table": ["int32", [4], values]}) == [0, 1, 0, 1]
    # Without the values, which the text leaves out, any device may differ.
    assert classes(lines, "r") == [0, 1, 2, 3]


def test_a_loop_keeps_apart_what_any_round_told_apart():
    body = """\
%body (s: (f32[8,8], f32[8,8], f32[8,8])) -> (f32[8,8], f32[8,8], f32[8,8]) {
  %s = (f32[8,8], f32[8,8], f32[8,8]) parameter(0)
  %a = f32[8,8] get-tuple-element(%s), index=0
  %b = f32[8,8] get-tuple-element(%s), index=1
  %c = f32[8,8] get-tuple-element(%s), index=2
  ROOT %t = (f32[8,8], f32[8,8], f32[8,8]) tuple(%b, %c, %c)
}

%cond (s: (f32[8,8], f32[8,8], f32[8,8])) -> pred[] {
  %s = (f32[8,8], f32[8,8], f32[8,8]) parameter(0)
  ROOT %p = pred[] constant(true)
}

"""
    lines = [
        *INPUTS,
        "%t = (f32[8,8], f32[8,8], f32[8,8]) tuple(%w, %w, %x)",
        "%l = (f32[8,8], f32[8,8], f32[8,8]) while(%t), condition=%cond, body=%body",
        "ROOT %r = f32[8,8] get-tuple-element(%l), index=0",
    ]
    assert classes(lines, "r", before=body) == [0, 0, 1, 1]


def test_shardings_are_read_in_the_forms_of_the_compilers():
    transposed = "{devices=[2,2]<=[2,2]T(1,0)}"
    assert sharded_tiles(transposed, 4).tolist() == [0, 2, 1, 3]
    assert sharded_tiles("{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}", 4).tolist() == [
        0,
        1,
        0,
        1,
    ]
    assert sharded_tiles("{devices=[2,1,2]<=[4] last_tile_dims={replicated}}", 4).max() == 1
    assert sharded_tiles("{devices=[2,1,2]<=[4] last_tile_dims={manual}}", 4) is None
    assert sharded_tiles("{devices=[8]<=[8]}", 4) is None
    assert sharded_tiles("{manual}", 4) is None


def test_products_of_one_line_are_told_with_their_axis():
    program = read([*INPUTS[:2], INPUTS[2].replace("%d", "ROOT %d")])
    (work,) = find_repeated_work(program, mw.explain("dp:2, tp:2", on="h100:4"))
    assert (work.copies, work.over, work.flops) == (2, "tp", 2 * 8**3)
    assert work.wasted == 8**3
    assert "are done 2 times over tp" in str(work)
    assert work.to_json()["axes"] == [{"name": "tp", "members": 2, "size": 2}]


rehearse = functools.partial(mw.rehearse, on="cpu:8", cache=False)


def layers(w, x):
    """Six layers with rematerialisation, forward and backward."""

    def loss(w, x):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
        return jnp.sum(h**2)

    return jax.value_and_grad(loss)(w, x)


@pytest.mark.slow
def test_what_is_left_is_the_program_before_it_was_partitioned():
    w = jax.ShapeDtypeStruct((6, 512, 512), "float32")
    whole = read_program(jax.jit(layers).lower(w, X).compile().as_text()).flops
    # Replicated over tp, the weights are multiplied there four times; rematerialised products
    # are in both programs and nobody's fault.
    r = rehearse(layers, w, X, mesh="dp:2, tp:4", in_shardings=[P(), P("dp")])
    assert r.time.useful_flops * 8 == pytest.approx(whole)
    assert r.time.flops == pytest.approx(4 * r.time.useful_flops)
    assert {work.over for work in r.time.repeated} == {"tp"}
    assert r.time.hardware_utilisation == pytest.approx(4 * r.time.utilisation)
    assert r.mfu == pytest.approx(0.75 * r.time.utilisation)
    assert f"The products of {work_line(r)} are done 4 times over tp" in str(r)
    assert "Utilisation counts useful work alone" in r._repr_html_()
    assert r.to_json()["time"]["repeated"][0]["copies"] == 4
    # Cut over both, or over fsdp alone, each product is done once.
    for mesh, specs in (
        ("dp:2, tp:4", [P(None, None, "tp"), P("dp")]),
        ("fsdp:8", [P(None, "fsdp"), P("fsdp")]),
    ):
        once = rehearse(layers, w, X, mesh=mesh, in_shardings=specs)
        assert once.time.repeated == ()
        assert once.time.flops * 8 == pytest.approx(whole)
        assert once.time.utilisation == once.time.hardware_utilisation
        # Of four products a layer one is computed again, which the model does not need.
        assert once.time.recomputed == pytest.approx(once.time.flops / 4)
        assert once.time.recomputed_bytes >= 6 * 64 * 512 * 4 / 8  # what six layers make
        assert once.mfu == pytest.approx(0.75 * once.time.utilisation)
        assert once.examples_per_second == pytest.approx(64 / once.time.total)
        assert once.tokens_per_second is None


def work_line(r):
    return r.time.repeated[0].source


def test_a_shard_map_that_leaves_an_axis_out_repeats_its_work():
    mesh = mw.abstract_mesh("dp:2, tp:4")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("dp"), check_vma=False
    )
    def inside(w, x):
        return jnp.tanh(x @ w)

    r = rehearse(lambda w, x: inside(w, x), W, X, mesh=mesh, in_shardings=[P(), P("dp")])
    (work,) = r.time.repeated
    assert (work.over, work.copies) == ("tp", 4)


def test_part_of_an_axis_is_told_as_a_part():
    # Two heads over four devices: each is computed by two of them.
    def step(w, x):
        w = jax.lax.with_sharding_constraint(w.reshape(2, 512, 256), P("tp2"))
        return jnp.einsum("bi,hio->hbo", x, w)

    r = rehearse(
        step, W, X, mesh="dp:2, tp1:2, tp2:2", in_shardings=[P(), P("dp")], out_shardings=P("tp2")
    )
    assert {(work.over, work.copies) for work in r.time.repeated} == {("tp1", 2)}
    program = read_program(r.text)
    placed = mw.explain("dp:2, tp:4", on="cpu:8")
    works = find_repeated_work(program, placed, r.arguments.rows)
    assert {str(part) for work in works for part in work.axes} == {"tp:2/4"}


def test_one_device_repeats_nothing():
    r = mw.rehearse(lambda w, x: x @ w, W, X, mesh="dp:1", on="cpu:1", cache=False)
    assert r.time.repeated == () and r.time.useful_flops == r.time.flops
