"""Memory that is written over counts once."""

import pytest

from meshwright.hlo.program import read_program
from meshwright.rehearsal.peak import live_buffers

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=1"

COMPUTATIONS = """
%update (u0: f32[1024], u1: f32[8], u2: s32[]) -> f32[1024] {
  %u0 = f32[1024] parameter(0)
  %u1 = f32[8] parameter(1)
  %u2 = s32[] parameter(2)
  %u3 = f32[1024] bitcast(%u0)
  ROOT %u4 = f32[1024] dynamic-update-slice(%u3, %u1, %u2)
}

%both (b0: f32[8], b1: f32[1024], b2: s32[]) -> (f32[8], f32[1024]) {
  %b0 = f32[8] parameter(0)
  %b1 = f32[1024] parameter(1)
  %b2 = s32[] parameter(2)
  %b3 = f32[8] negate(%b0)
  %b4 = f32[1024] fusion(%b1, %b0, %b2), kind=kLoop, calls=%update
  ROOT %b5 = (f32[8], f32[1024]) tuple(%b3, %b4)
}

%scaled (s0: f32[1024], s1: f32[]) -> (f32[], f32[1024]) {
  %s0 = f32[1024] parameter(0)
  %s1 = f32[] parameter(1)
  %s2 = f32[1024] broadcast(%s1), dimensions={}
  %s3 = f32[1024] multiply(%s0, %s2)
  %s4 = f32[] reduce(%s3, %s1), dimensions={0}, to_apply=%add
  ROOT %s5 = (f32[], f32[1024]) tuple(%s4, %s3)
}

%opaque (o0: f32[8], o1: f32[1024]) -> (f32[8], f32[1024]) {
  %o0 = f32[8] parameter(0)
  %o1 = f32[1024] parameter(1)
  %o2 = f32[1024] reverse(%o1), dimensions={0}
  ROOT %o3 = (f32[8], f32[1024]) tuple(%o0, %o2)
}

%turned (t0: f32[1024]) -> f32[1024] {
  %t0 = f32[1024] parameter(0)
  %t1 = f32[1024] reverse(%t0), dimensions={0}
  ROOT %t2 = f32[1024] add(%t0, %t1)
}
"""


def alive(lines, head=HEAD):
    """The large values at the peak of a program that makes `big` and then does what it is told."""
    lines = "\n".join("  " + line.strip() for line in lines.splitlines())
    text = f"""{head}
{COMPUTATIONS}
ENTRY %main (p: f32[1024], few: f32[8], at: s32[], by: f32[]) -> f32[8] {{
  %p = f32[1024] parameter(0)
  %few = f32[8] parameter(1)
  %at = s32[] parameter(2)
  %by = f32[] parameter(3)
  %big = f32[1024] broadcast(%by), dimensions={{}}
{lines}
}}
"""
    return sorted(b.name for b in live_buffers(read_program(text)) if b.bytes >= 4096)


LAST = "ROOT %r = f32[8] slice(%new), slice={[0:8]}"


@pytest.mark.parametrize(
    "made",
    [
        # In a result's own words, with tuples or without.
        "%new = f32[1024] fusion(%big), kind=kCustom, "
        "output_to_operand_aliasing={{}: (0, {})}, calls=%turned",
        '%all = (f32[8], f32[1024], f32[1024]) custom-call(%big), custom_call_target="f", '
        "output_to_operand_aliasing={{1}: (0, {}), {2}: (0, {})}\n"
        "%new = f32[1024] get-tuple-element(%all), index=2",
        "%pair = (f32[8], f32[1024]) tuple(%few, %big)\n"
        '%new = f32[1024] custom-call(%pair), custom_call_target="f", '
        "output_to_operand_aliasing={{}: (0, {1})}",
        # In those of a TPU's compiler: operands are numbered before results.
        "%all = (f32[8], f32[1024]) fusion(%few, %big), kind=kLoop, calls=%opaque, "
        'backend_config={"aliasing_operands":{"lists":[{"indices":["1","3"]}]}}\n'
        "%new = f32[1024] get-tuple-element(%all), index=1",
        # By updates in place.
        "%new = f32[1024] dynamic-update-slice(%big, %few, %at)",
        "%new = f32[1024] scatter(%big, %at, %few), to_apply=%add",
        "%new = f32[1024] fusion(%big, %few, %at), kind=kLoop, calls=%update",
        "%all = (f32[8], f32[1024]) fusion(%few, %big, %at), kind=kLoop, calls=%both\n"
        "%new = f32[1024] get-tuple-element(%all), index=1",
        # Element by element.
        "%new = f32[1024] negate(%big)",
        "%all = (f32[], f32[1024]) fusion(%big, %by), kind=kLoop, calls=%scaled\n"
        "%new = f32[1024] get-tuple-element(%all), index=1",
        "%begun = f32[1024] all-reduce-start(%big), to_apply=%add\n"
        "%new = f32[1024] all-reduce-done(%begun)",
    ],
)
def test_what_is_written_over_an_operand_is_that_operand(made):
    assert alive(f"{made}\n  {LAST}") == ["big", "p"]


UPDATE = "%new = f32[1024] dynamic-update-slice({}, %few, %at)"


def test_an_array_that_is_needed_later_is_not_updated_in_place():
    later = "%sum = f32[8] reduce(%new, %big), dimensions={0}, to_apply=%add"
    last = "ROOT %r = f32[8] negate(%sum)"
    assert alive(f"{UPDATE.format('%big')}\n  {later}\n  {last}") == ["big", "new", "p"]


def test_an_argument_is_updated_in_place_only_if_it_was_given_away():
    lines = f"{UPDATE.format('%p')}\n  %used = f32[8] slice(%big)\n  {LAST}"
    assert alive(lines) == ["big", "new", "p"]
    donated = HEAD + ", input_output_alias={ {7}: (0, {}, may-alias) }"
    assert alive(lines, donated) == ["big", "p"]


def test_an_update_of_an_update_is_still_the_same_memory():
    first = "%one = f32[1024] dynamic-update-slice(%big, %few, %at)"
    assert alive(f"{first}\n  {UPDATE.format('%one')}\n  {LAST}") == ["big", "p"]


def test_elements_from_elsewhere_need_the_old_array_to_the_end():
    made = "%new = f32[1024] fusion(%big), kind=kLoop, calls=%turned"
    assert alive(f"{made}\n  {LAST}") == ["big", "new", "p"]


def test_a_compiler_that_says_what_is_shared_is_believed_when_it_says_nothing_is():
    made = '%new = f32[1024] negate(%big), backend_config={"aliasing_operands":{"lists":[]}}'
    assert alive(f"{made}\n  {LAST}") == ["big", "new", "p"]


def test_an_element_of_a_tuple_does_not_keep_the_others():
    lines = """%all = (f32[8], f32[1024]) custom-call(%few), custom_call_target="f"
  %large = f32[1024] get-tuple-element(%all), index=1
  %used = f32[8] reduce(%large, %big), dimensions={0}, to_apply=%add
  %more = f32[1024] broadcast(%by), dimensions={}
  %last = f32[1024] concatenate(%more), dimensions={0}
  %small = f32[8] get-tuple-element(%all), index=0
  ROOT %r = f32[8] add(%small, %last)"""
    assert alive(lines) == ["all", "big", "p"]


def test_a_results_place_is_set_aside_from_the_start():
    lines = """%used = f32[8] slice(%big), slice={[0:8]}
  ROOT %r = f32[1024] concatenate(%used), dimensions={0}"""
    assert alive(lines) == ["big", "p", "r"]
