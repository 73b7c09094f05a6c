"""One entry per collective, however it is written, with its bytes and its times."""

import pytest
from collectives_helpers import collectives_of

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.hlo.program import read_program
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.collectives.find import find_transfers

X = "%x = f32[8,16]{1,0} parameter(0)"
TP = "replica_groups={{0,1,2,3},{4,5,6,7}}"
DP = "replica_groups=[4,2]<=[2,4]T(1,0)"


@pytest.mark.parametrize(
    ("line", "kind", "size", "moved", "over"),
    [
        (f"all-gather(%x), {TP}, dimensions={{0}}", "all-gather", 2048, 1536, "tp"),
        (f"all-reduce(%x), {TP}", "all-reduce", 512, 768, "tp"),
        (f"reduce-scatter(%x), {DP}, dimensions={{0}}", "reduce-scatter", 512, 256, "dp"),
        (f"all-to-all(%x), {TP}, dimensions={{0}}", "all-to-all", 512, 384, "tp"),
        (f"ragged-all-to-all(%x, %x), {TP}", "ragged-all-to-all", 1024, 768, "tp"),
        (f"collective-broadcast(%x), {DP}", "collective-broadcast", 2048, 2048, "dp"),
        (
            "collective-permute(%x), source_target_pairs={{0,4},{4,0}}",
            "collective-permute",
            512,
            512,
            "dp",
        ),
        ("all-reduce(%x), replica_groups={}", "all-reduce", 512, 896, "dp, tp"),
        (
            "all-reduce(%x), replica_groups={{0,5},{1,4},{2,3},{6,7}}",
            "all-reduce",
            512,
            512,
            "irregular 2",
        ),
        (
            "all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}",
            "all-reduce",
            512,
            512,
            "tp:2/4",
        ),
        (
            "all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",
            "all-reduce",
            512,
            0,
            "itself",
        ),
    ],
)
def test_every_kind_has_its_bytes(line, kind, size, moved, over):
    (entry,) = collectives_of([X, f"ROOT %c = f32[32,16]{{1,0}} {line}"])
    assert (entry.kind, entry.bytes, entry.moved, entry.over) == (kind, size, moved, over)
    assert not entry.asynchronous


def test_several_arrays_are_one_entry():
    (entry,) = collectives_of(
        [X, f"ROOT %c = (f32[8,16]{{1,0}}, f32[8,16]{{1,0}}) all-reduce(%x, %x), {TP}"]
    )
    assert (entry.bytes, entry.shape) == (1024, "2 x f32[8,16]")


@pytest.mark.parametrize(
    ("config", "beside"),
    [("", True), (', backend_config={"is_sync":true}', False)],
)
def test_a_start_and_its_end_are_one(config, beside):
    (entry,) = collectives_of(
        [
            X,
            f"%s = (f32[8,16]{{1,0}}, f32[32,16]{{1,0}}) all-gather-start(%x), {TP}{config}",
            "%work = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
            "ROOT %d = f32[32,16]{1,0} all-gather-done(%s)",
        ]
    )
    assert (entry.bytes, entry.asynchronous, entry.instructions) == (2048, beside, ("s", "d"))
    assert entry.meanwhile == (2 * 8 * 8 * 16 if beside else 0)


def test_a_wrapped_start_is_one_with_what_it_calls():
    wrapped = f"""
%wrapped (a: f32[8,16]) -> f32[2,16] {{
  %a = f32[8,16]{{1,0}} parameter(0)
  ROOT %rs = f32[2,16]{{1,0}} reduce-scatter(%a), {TP}, dimensions={{0}}
}}
"""
    (entry,) = collectives_of(
        [
            X,
            "%s = ((f32[8,16]{1,0}), f32[2,16]{1,0}) async-start(%x), calls=%wrapped",
            "%u = ((f32[8,16]{1,0}), f32[2,16]{1,0}) async-update(%s)",
            "ROOT %d = f32[2,16]{1,0} async-done(%u)",
        ],
        before=wrapped,
    )
    assert (entry.kind, entry.bytes, entry.asynchronous) == ("reduce-scatter", 512, True)


def test_an_all_reduce_that_is_cut_at_once_is_a_reduce_scatter():
    fused = f"""
%all-reduce-scatter.1 (a: f32[8,16]) -> f32[2,16] {{
  %a = f32[8,16]{{1,0}} parameter(0)
  %r = f32[8,16]{{1,0}} all-reduce(%a), {TP}
  %zero = s32[] constant(0)
  ROOT %cut = f32[2,16]{{1,0}} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={{2,16}}
}}
"""
    (entry,) = collectives_of(
        [
            X,
            "ROOT %f = f32[2,16]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1, "
            'metadata={op_name="jit(f)/dot_general"}',
        ],
        before=fused,
    )
    assert (entry.kind, entry.bytes, entry.moved) == ("reduce-scatter", 512, 384)
    assert entry.op_name == "jit(f)/dot_general"


SPREAD = "\n".join(
    f"""
%{name} (a: f32[8,16]) -> f32[32,16] {{
  %a.{name} = f32[8,16]{{1,0}} parameter(0)
  %g.{name} = f32[32,16]{{1,0}} all-gather(%a.{name}), channel_id=4, {TP}, \
dimensions={{0}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  %d.{name} = f32[8,8]{{1,0}} dot(%a.{name}, %a.{name}), lhs_contracting_dims={{1}}
  ROOT %r.{name} = f32[32,16]{{1,0}} custom-call(%g.{name}), custom_call_target="{target}"
}}"""
    for name, target in (
        ("begin", "AsyncCollectiveStart"),
        ("carry", "Other"),
        ("end", "AsyncCollectiveDone"),
    )
)


def test_a_collective_spread_over_fusions_is_one():
    (entry,) = collectives_of(
        [
            X,
            "%one = f32[32,16]{1,0} fusion(%x), kind=kCustom, calls=%begin",
            "%two = f32[32,16]{1,0} fusion(%x), kind=kOutput, calls=%carry",
            "ROOT %three = f32[32,16]{1,0} fusion(%x), kind=kCustom, calls=%end",
        ],
        before=SPREAD,
    )
    assert entry.instructions == ("g.begin", "g.carry", "g.end")
    assert (entry.bytes, entry.times.count, entry.asynchronous) == (2048, 1, True)
    assert entry.meanwhile == 3 * 2 * 8 * 8 * 16


def transfer(target, kind, array="f32[8,16]"):
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="all-reduce_0",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    return [
        X,
        "%t = token[] after-all()",
        f"%s = (f32[8,16]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=1, {attributes}",
        f"%r = ({array}{{1,0}}, u32[], token[]) recv(%t), channel_id=2, {attributes}",
        "%sd = token[] send-done(%s), channel_id=1",
        f"ROOT %rd = ({array}{{1,0}}, token[]) recv-done(%r), channel_id=2",
    ]


@pytest.mark.parametrize(
    ("target", "kind", "array", "expected"),
    [
        ('"{1,2}x{0:3}"', "ALL_REDUCE", "f32[8,16]", ("all-reduce", 512, 512, "dp")),
        (
            "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}",
            "ALL_GATHER",
            "f32[16,16]",
            ("all-gather", 1024, 512, "dp"),
        ),
        (
            "{{100000->200000},{200000->100000}}",
            "ONE_TO_ONE",
            "f32[8,16]",
            ("collective-permute", 512, 512, "dp"),
        ),
        (
            "{{100001->200002},{200002->100001}}",
            "ONE_TO_ONE",
            "f32[8,16]",
            ("collective-permute", 512, 512, "dp, tp"),
        ),
    ],
)
def test_sends_between_slices_are_the_collective_they_make_up(target, kind, array, expected):
    (entry,) = collectives_of(transfer(target, kind, array), on="v5e:2x2", slices=2, devices=4)
    assert (entry.kind, entry.bytes, entry.moved, entry.over) == expected
    assert (entry.links, entry.asynchronous) == ("network", True)
    assert entry.instructions == ("s", "r", "sd", "rd")


def test_a_permutation_taken_apart_is_one():
    pairs = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,4},{1,5}}}"
    (entry,) = collectives_of(
        [
            X,
            "%t = token[] after-all()",
            f"%r = (f32[8,16]{{1,0}}, u32[], token[]) recv(%t), channel_id=3, {pairs}",
            f"%s = (f32[8,16]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=3, {pairs}",
            "%sd = token[] send-done(%s), channel_id=3",
            "ROOT %rd = (f32[8,16]{1,0}, token[]) recv-done(%r), channel_id=3",
        ]
    )
    assert (entry.kind, entry.bytes, entry.over) == ("collective-permute", 512, "dp")


def test_everywhere_means_every_device_of_the_slices():
    program = read_program(
        "HloModule m\n\nENTRY %m () -> f32[] {\n  "
        + "\n  ".join(transfer('"{1,3}x{0:1,3}"', "ALL_REDUCE"))
        + "\n}\n"
    )
    (found,) = find_transfers(program.entry)
    assert [group.tolist() for group in found.groups] == [
        [100_000, 300_000],
        [100_001, 300_001],
        [100_003, 300_003],
    ]


@pytest.mark.parametrize(("groups", "over"), [("{{0,1},{2,3}}", "tp"), ("{{0,2},{1,3}}", "fsdp")])
def test_numbers_of_one_slice_mean_every_slice(groups, over):
    (entry,) = collectives_of(
        [X, f"ROOT %c = f32[8,16]{{1,0}} all-reduce(%x), replica_groups={groups}"],
        spec="fsdp:2, dp:2, tp:2",
        on="v5e:2x2",
        slices=2,
        devices=4,
    )
    assert (entry.over, entry.groups, entry.group_size) == (over, 4, 2)


def test_a_program_for_another_mesh_is_refused():
    head = "HloModule m, num_partitions=4\n\n"
    text = head + "ENTRY %m () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n"
    with pytest.raises(MeshwrightError, match="for 4 devices, the mesh has 8"):
        analyze(read_program(text), mw.explain("dp:8", on="h100:8"))
