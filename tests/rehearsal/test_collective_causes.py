"""Why a collective is there, by the stated rules, and the compiler's complaints."""

import subprocess
import sys

import pytest
from collectives_helpers import collectives_of, compiled_collectives

from meshwright.hlo.instructions import Source, primitives
from meshwright.rehearsal.collectives.types import ShardingConflict, read_conflicts

TP = "replica_groups={{0,1,2,3},{4,5,6,7}}"
DP = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
W = "%w = bf16[64,16]{1,0} parameter(0), metadata={op_name=\"params['w']\"}"
STACK = "%w = bf16[6,64,16]{2,1,0} parameter(0)"
TOKENS = '%w = s32[64,16]{1,0} parameter(0), metadata={op_name="tokens"}'
BACKWARD, FORWARD = "jit(step)/transpose(jvp())", "jit(step)/jvp()"


def only(lines, **options):
    (entry,) = collectives_of(lines, **options)
    return entry


def named(op_name):
    return f'metadata={{op_name="{op_name}"}}'


def test_gathering_an_argument_is_a_parameter_gather():
    entry = only(
        [
            W,
            "%cast = f32[64,16]{1,0} convert(%w)",
            "%turned = f32[16,64]{1,0} transpose(%cast), dimensions={1,0}",
            f"ROOT %g = f32[64,64]{{1,0}} all-gather(%turned), {TP}, {named(FORWARD + '/add')}",
        ]
    )
    assert (entry.cause, entry.why) == ("parameter gathers", "gathers params['w']")


def test_whole_numbers_are_data_not_parameters():
    gather = f"ROOT %g = s32[64,64]{{1,0}} all-gather(%w), {TP}, {named(FORWARD + '/gather')}"
    entry = only([TOKENS, gather])
    assert (entry.cause, entry.why) == ("activation exchanges", "needed by gather")


def test_a_result_in_an_arguments_place_is_a_parameter_gather():
    entry = only(
        [
            "%w = bf16[64,16]{1,0} parameter(0)",
            "%new = bf16[16,16]{1,0} iota(), iota_dimension=0",
            f"%g = bf16[64,16]{{1,0}} all-gather(%new), {TP}, {named('jit(step)/sub')}",
            "%c = bf16[64,16]{1,0} copy(%g)",
            "ROOT %t = (bf16[64,16]{1,0}) tuple(%c)",
        ]
    )
    assert (entry.cause, entry.why) == (
        "parameter gathers",
        "gathers a result that replaces an argument",
    )


@pytest.mark.parametrize(
    ("argument", "array", "groups", "name", "cause"),
    [
        (W, "f32[64,16]", DP, f"{BACKWARD}/dot_general", "gradient sums"),
        (W, "f32[16,64]", DP, f"{BACKWARD}/dot_general", "gradient sums"),
        (STACK, "f32[64,16]", DP, f"{BACKWARD}/while/body/dot_general", "gradient sums"),
        (W, "f32[128,16]", DP, f"{BACKWARD}/dot_general", "gradient sums"),
        (W, "f32[192,16]", DP, f"{BACKWARD}/dot_general", "gradient sums"),
        (W, "f32[192,16]", DP, f"{FORWARD}/dot_general", "activation exchanges"),
        (W, "f32[192,16]", TP, f"{BACKWARD}/dot_general", "activation exchanges"),
        (W, "f32[64,16]", DP, f"{FORWARD}/psum", "activation exchanges"),
        (W, "f32[64,16]", DP, f"{FORWARD}/dot_general", "activation exchanges"),
        (W, "f32[64,16]", TP, f"{FORWARD}/dot_general", "activation exchanges"),
        (W, "f32[]", DP, f"{FORWARD}/reduce_sum", "activation exchanges"),
    ],
)
def test_sums_in_the_backward_over_data_or_in_a_parameters_shape_are_gradients(
    argument, array, groups, name, cause
):
    made = f"%a = {array} iota(), iota_dimension=0"
    entry = only([argument, made, f"ROOT %r = {array} all-reduce(%a), {groups}, {named(name)}"])
    assert entry.cause == cause


X = "%x = f32[8,48]{1,0} parameter(1)"
BACKWARD_DOT = f"%d = f32[] constant(0), {named(BACKWARD + '/dot_general')}"


@pytest.mark.parametrize(
    ("array", "groups", "name", "others", "cause"),
    [
        ("f32[64,16]", DP, "jit(step)/psum", BACKWARD_DOT, "gradient sums"),
        ("f32[64,16]", DP, "", BACKWARD_DOT, "gradient sums"),
        ("f32[64,16]", DP, "jit(step)/psum", "", "activation exchanges"),
        ("f32[64,16]", DP, "", "", "activation exchanges"),
        ("f32[64,16]", DP, "jit(step)/dot_general", BACKWARD_DOT, "activation exchanges"),
        ("f32[64,16]", TP, "jit(step)/psum", BACKWARD_DOT, "activation exchanges"),
        ("f32[8,48]", DP, "jit(step)/psum", BACKWARD_DOT, "activation exchanges"),
        ("f32[8,48]", TP, f"{BACKWARD}/dot_general", "", "activation exchanges"),
        ("f32[64,16]", TP, f"{BACKWARD}/dot_general", "", "gradient sums"),
    ],
)
def test_gradients_need_a_backward_pass_and_a_shape_that_comes_out_again(
    array, groups, name, others, cause
):
    entry = only(
        [
            W,
            X,
            *filter(None, [others]),
            f"%a = {array} iota(), iota_dimension=0",
            f"%r = {array} all-reduce(%a), {groups}" + (f", {named(name)}" if name else ""),
            "ROOT %t = (bf16[64,16]{1,0}) tuple(%w)",
        ]
    )
    assert entry.cause == cause


def test_a_forward_pass_alone_sums_no_gradients():
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import meshwright as mw

    mesh = mw.mesh("dp:2, fsdp:4")

    def shaped(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def forward(x, w):
        return jnp.tanh(x @ w).sum()

    args = shaped((64, 512), None, "fsdp"), shaped((512, 512), "fsdp", None)
    found = compiled_collectives(forward, args, mesh)
    assert any("f32[64,512]" in entry.shape for entry in found)
    assert {entry.cause for entry in found} == {"activation exchanges"}


OVER_DP = "{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}"
OVER_TP = "{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}"


def windowed(name, moved, given, array="bf16[64,16]", pairs=OVER_DP):
    """A dot taken apart by the TPU compiler: a loop that permutes element 1 of its state."""
    state = f"(u32[], {array}, f32[])"
    before = f"""
%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %piece = {array} get-tuple-element(%s), index=1
  %sum = f32[] get-tuple-element(%s), index=2
  %changed = {array} add(%piece, %piece)
  %start = ({array}, {array}) collective-permute-start({moved}), \
source_target_pairs={{{pairs}}}, {named(name)}
  %done = {array} collective-permute-done(%start)
  ROOT %next = {state} tuple(%i, %done, %sum)
}}

%test (s: {state}) -> pred[] {{
  %s = {state} parameter(0)
  ROOT %on = pred[] constant(true)
}}
"""
    lines = [
        "%w = f32[64,16]{1,0} parameter(0), metadata={op_name=\"params['w']\"}",
        "%cast = bf16[64,16]{1,0} convert(%w)",
        f"%made = {array} iota(), iota_dimension=0",
        "%zero = u32[] constant(0)",
        "%none = f32[] constant(0)",
        f"%state = {state} tuple(%zero, {given}, %none)",
        f"%loop = {state} while(%state), condition=%test, body=%body",
        "ROOT %t = (f32[64,16]{1,0}) tuple(%w)",
    ]
    return only(lines, before=before)


@pytest.mark.parametrize("pairs", [OVER_DP, OVER_TP])
@pytest.mark.parametrize(
    ("pass_", "moved", "given", "cause", "why"),
    [
        (FORWARD, "%piece", "%cast", "parameter gathers", "gathers params['w']"),
        (BACKWARD, "%piece", "%cast", "parameter gathers", "gathers params['w']"),
        (BACKWARD, "%changed", "%made", "gradient sums", "sums gradients"),
        (BACKWARD, "%changed", "%cast", "gradient sums", "sums gradients"),
        (BACKWARD, "%piece", "%made", "activation exchanges", "exchanged"),
        (FORWARD, "%changed", "%made", "activation exchanges", "exchanged"),
        (FORWARD, "%piece", "%made", "activation exchanges", "exchanged"),
    ],
)
def test_a_dot_in_pieces_counts_as_what_it_stands_for(pass_, moved, given, cause, why, pairs):
    entry = windowed(f"{pass_}/while/body/dot_general", moved, given, pairs=pairs)
    assert (entry.cause, entry.why) == (cause, f"{why} piece by piece for dot_general")


@pytest.mark.parametrize(
    ("pairs", "cause"), [(OVER_DP, "gradient sums"), (OVER_TP, "activation exchanges")]
)
def test_pieces_of_no_parameters_shape_are_gradients_over_data_only(pairs, cause):
    name = f"{BACKWARD}/while/body/dot_general"
    assert windowed(name, "%changed", "%made", "bf16[32,16]", pairs).cause == cause


def test_a_dots_result_sent_to_another_slice_is_no_piece_of_it():
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="p_0",'
        "_xla_megascale_target={{100000->200000},{200000->100000}},"
        '_xla_megascale_transfer_type="ONE_TO_ONE"}'
    )
    lines = [
        W,
        f"%a = f32[64,16]{{1,0}} iota(), iota_dimension=0, {named(BACKWARD + '/dot_general')}",
        "%t = token[] after-all()",
        f"%s = (f32[64,16]{{1,0}}, u32[], token[]) send(%a, %t), channel_id=1, {attributes}",
        f"%r = (f32[64,16]{{1,0}}, u32[], token[]) recv(%t), channel_id=2, {attributes}",
        "%sd = token[] send-done(%s), channel_id=1",
        "ROOT %rd = (f32[64,16]{1,0}, token[]) recv-done(%r), channel_id=2",
    ]
    entry = only(lines, on="v5e:2x2", slices=2)
    assert (entry.kind, entry.cause) == ("collective-permute", "implicit resharding")


def test_pieces_that_no_dot_needs_are_implicit_resharding():
    assert windowed(f"{FORWARD}/add", "%piece", "%cast").cause == "implicit resharding"


@pytest.mark.parametrize(
    ("kind", "operation", "cause"),
    [
        ("all-gather", "dot_general", "activation exchanges"),
        ("all-gather", "all_gather", "activation exchanges"),
        ("all-gather", "add", "implicit resharding"),
        ("all-to-all", "reshape", "implicit resharding"),
        ("all-to-all", "all_to_all", "activation exchanges"),
        ("all-to-all", "sharding_constraint", "activation exchanges"),
        ("collective-permute", "ppermute", "activation exchanges"),
        ("collective-permute", "concatenate", "activation exchanges"),
        ("collective-permute", "dot_general", "activation exchanges"),
        ("collective-permute", "", "implicit resharding"),
    ],
)
def test_moves_are_asked_for_or_not(kind, operation, cause):
    whom = "source_target_pairs={{0,1},{1,0}}" if kind == "collective-permute" else TP
    name = f", {named(f'jit(f)/{operation}')}" if operation else ""
    entry = only(
        [
            "%a = f32[8,8]{1,0} iota(), iota_dimension=0",
            f"ROOT %m = f32[32,8] {kind}(%a), {whom}{name}",
        ]
    )
    assert entry.cause == cause


def test_a_lost_name_is_found_at_the_neighbour():
    fused = """
%fused (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, \
metadata={op_name="jit(f)/dot_general" source_file="me.py" source_line=3}
}
"""
    entry = only(
        [
            "%x = f32[8,8]{1,0} parameter(0)",
            "%f = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused",
            "%b = f32[64]{0} bitcast(%f)",
            f"ROOT %r = f32[64]{{0}} all-reduce(%b), {TP}",
        ],
        before=fused,
    )
    assert (entry.op_name, entry.source) == ("jit(f)/dot_general", Source("me.py", 3))


def test_the_name_of_an_argument_is_no_operation():
    entry = only(
        [
            '%w = f32[8,8]{1,0} parameter(0), metadata={op_name="w"}',
            f'%g = f32[32,8]{{1,0}} all-gather(%w), {TP}, metadata={{op_name="w"}}',
            f"ROOT %d = f32[32,32]{{1,0}} dot(%g, %g), {named('jit(f)/dot_general')}",
        ]
    )
    assert (entry.op_name, entry.why) == ("jit(f)/dot_general", "gathers w")


def test_a_name_of_several_operations_comes_apart():
    assert primitives("jit(s)/(transpose(jvp())/scatter-add:jvp()/reduce_sum)") == [
        "scatter-add",
        "reduce_sum",
    ]
    assert primitives("") == []


# As printed by the compilers of jax 0.12, jax 0.10, and in 2023.
COMPLAINTS = [
    (
        "W1115 09:09:09.678682    4201 spmd_partitioner.cc:666] [SPMD] Involuntary full "
        "rematerialization. The compiler cannot go from sharding {mesh['fsdp'=2,'tp'=4], "
        "[{}, {}, {'fsdp'}]} to {devices=[2,1,1,4]<=[8] last_tile_dim_replicate} efficiently for "
        "HLO operation %fake_parameter.2 = bf16[64,256,512]{2,1,0} parameter(2), "
        "sharding={mesh['fsdp'=2,'tp'=4], [{}, {}, {'fsdp'}]}. As the last resort, SPMD will "
        "replicate the tensor and then partition it to obtain the target sharding, which is "
        "inefficient.",
        ShardingConflict(
            "fake_parameter.2",
            "bf16[64,256,512]",
            "{mesh['fsdp'=2,'tp'=4], [{}, {}, {'fsdp'}]}",
            "{devices=[2,1,1,4]<=[8] last_tile_dim_replicate}",
        ),
    ),
    (
        "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
        "{devices=[4,1,1,1]<=[4]} to {devices=[1,1,2,2]<=[4]} efficiently for HLO operation %copy "
        "= f32[1,3,12,8]{3,2,1,0} copy(%reshape.0), sharding={devices=[4,1,1,1]<=[4]}, "
        'metadata={op_name="jit(f)/mul" stack_frame_id=6}. As the last resort, SPMD will',
        ShardingConflict(
            "copy",
            "f32[1,3,12,8]",
            "{devices=[4,1,1,1]<=[4]}",
            "{devices=[1,1,2,2]<=[4]}",
            "jit(f)/mul",
        ),
    ),
    (
        "[spmd] Involuntary full rematerialization. The compiler was not able to go from sharding "
        "{devices=[2,4]0,1,2,3,4,5,6,7} to {devices=[8,1]0,1,2,3,4,5,6,7} without doing a full "
        "rematerialization of the tensor for HLO operation: %add.1 = f32[8,4]{1,0} add(f32[8,4] "
        '%a, f32[8,4] %b), metadata={op_name="jit(f)/add" source_file="/somewhere/t.py" '
        "source_line=4}. You probably want to enrich the sharding annotations to prevent this "
        "from happening.",
        ShardingConflict(
            "add.1",
            "f32[8,4]",
            "{devices=[2,4]0,1,2,3,4,5,6,7}",
            "{devices=[8,1]0,1,2,3,4,5,6,7}",
            "jit(f)/add",
            Source("/somewhere/t.py", 4),
        ),
    ),
]


@pytest.mark.parametrize(("stderr", "conflict"), COMPLAINTS)
def test_complaints_are_read(stderr, conflict):
    assert read_conflicts(f"something else\n{stderr}\n{stderr}\nand more") == [conflict]
    assert read_conflicts("a quiet compile") == []


def test_every_complaint_of_a_text_is_read():
    assert read_conflicts("\n".join(text for text, _ in COMPLAINTS)) == [c for _, c in COMPLAINTS]


def test_what_the_partitioner_complained_of_is_named_with_its_shardings():
    conflict = COMPLAINTS[1][1]
    lines = [
        "%a = f32[1,3,12,8]{3,2,1,0} iota(), iota_dimension=0",
        f"ROOT %g = f32[4,3,12,8]{{3,2,1,0}} all-gather(%a), {TP}, dimensions={{0}}, "
        'metadata={op_name="jit(f)/mul" source_file="me.py" source_line=9}',
    ]
    found = collectives_of(lines, conflicts=[conflict])
    assert (found[0].cause, found[0].conflict.before) == ("implicit resharding", conflict.before)
    assert found.conflicts[0].source == Source("me.py", 9)
    other = lines[1].replace("jit(f)/mul", "jit(f)/dot_general")
    assert collectives_of([lines[0], other], conflicts=[conflict])[0].conflict is None


CONFLICTING = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import meshwright as mw

jax.config.update("jax_num_cpu_devices", 8)
mesh = mw.mesh("dp:2, fsdp:2, tp:2")

def lie(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

def conflict(x):
    x = lie(jnp.sin(x), ("dp", "fsdp", "tp"), None)
    return lie(x.reshape(4, 6, 12, 8) * 2, None, "dp", "fsdp", "tp")

where = NamedSharding(mesh, P(("dp", "fsdp", "tp")))
x = jax.ShapeDtypeStruct((24, 96), jnp.float32, sharding=where)
print(jax.jit(conflict).lower(x).compile().as_text())
"""


def test_a_real_complaint_finds_its_collectives():
    import meshwright as mw
    from meshwright.hlo.program import read_program
    from meshwright.rehearsal.collectives.analyze import analyze

    done = subprocess.run(
        [sys.executable, "-c", CONFLICTING], capture_output=True, text=True, timeout=120, check=True
    )
    conflicts = read_conflicts(done.stderr)
    assert [conflict.op_name for conflict in conflicts] == ["jit(conflict)/mul"]
    found = analyze(
        read_program(done.stdout), mw.explain("dp:2, fsdp:2, tp:2", on="cpu:8"), conflicts
    )
    gathers = [entry for entry in found if entry.kind == "all-gather"]
    assert gathers
    assert all(entry.cause == "implicit resharding" and entry.conflict for entry in gathers)
