"""The collectives as text, HTML and JSON."""

import json

import pytest
from collectives_helpers import collectives_of

from meshwright.rehearsal.collectives.types import ShardingConflict

TP = "replica_groups={{0,1,2,3},{4,5,6,7}}"
LINES = [
    "%x = f32[64,16]{1,0} parameter(0)",
    "%a = f32[512,512]{1,0} iota(), iota_dimension=0",
    f"%r1 = f32[512,512]{{1,0}} all-reduce(%a), {TP}, "
    'metadata={op_name="jit(f)/dot_general" source_file="/me/model.py" source_line=3}',
    f"%r2 = f32[512,512]{{1,0}} all-reduce(%r1), {TP}, "
    'metadata={op_name="jit(f)/dot_general" source_file="/me/model.py" source_line=3}',
    f"%g = f32[256,16]{{1,0}} all-gather(%x), {TP}, "
    'metadata={op_name="jit(f)/dot_general" source_file="/me/model.py" source_line=4}',
    "%s = (f32[512,512]{1,0}, f32[512,512]{1,0}) collective-permute-start(%r2), "
    "source_target_pairs={{0,1},{1,0}}, "
    'metadata={op_name="jit(f)/add" source_file="/me/model.py" source_line=5}',
    "%d = f32[512,512]{1,0} collective-permute-done(%s)",
    "ROOT %t = (f32[512,512]{1,0}, f32[256,16]{1,0}) tuple(%d, %g)",
]
CONFLICT = ShardingConflict("copy", "f32[8]", "{devices=[4]<=[4]}", "{replicated}", "jit(f)/mul")

TEXT = """\
4 collectives: a device sends 4.012 MiB, 66.1 us if nothing runs beside them

implicit resharding: 1 collective, 1 MiB sent, 6.73 us
collective  array         over  bytes  times   in all  links   source
permute*    f32[512,512]  tp    1 MiB      1  6.73 us  NVLink  model.py:5 add

parameter gathers: 1 collective, 12 KiB sent, 8.39 us
collective  array        over   bytes  times   in all  links   source
all-gather  f32[256,16]  tp    16 KiB      1  8.39 us  NVLink  model.py:4 dot_general

activation exchanges: 2 collectives, 3 MiB sent, 51.0 us
collective  array         over  bytes  times   in all  links   source
all-reduce  f32[512,512]  tp    1 MiB      2  51.0 us  NVLink  model.py:3 dot_general
conflict: f32[8] copy: from {devices=[4]<=[4]} to {replicated}; no collective is left of it
* runs beside other work"""


def test_the_text_is_grouped_by_cause_and_like_rows_are_one():
    assert str(collectives_of(LINES, conflicts=[CONFLICT])) == TEXT


def test_no_line_is_wider_than_a_screen():
    lines = [line.replace("/me/model.py", "/me/" + "long" * 30 + ".py") for line in LINES]
    lines = [line.replace("512,512", ",".join(["2"] * 18)) for line in lines]
    conflict = ShardingConflict(
        "copy" * 20, "f32[8]", "{devices=[4]<=[4]} " * 9, "{replicated} " * 9
    )
    text = str(collectives_of(lines, conflicts=[conflict]))
    assert max(map(len, text.splitlines())) <= 100
    assert "f32[2,2" in text


def test_many_rows_are_cut_with_a_word():
    lines = ["%x = f32[64]{0} parameter(0)"]
    lines += [
        f'%r{i} = f32[{i}]{{0}} all-reduce(%x), {TP}, metadata={{op_name="jit(f)/psum"}}'
        for i in range(1, 61)
    ]
    lines.append("ROOT %t = () tuple()")
    lines[0] = "%x = f32[64]{0} iota(), iota_dimension=0"
    varied = [
        line.replace("%x)", f"%y{i})") if i else line for i, line in enumerate(lines[:-1])
    ] + lines[-1:]
    made = [f"%y{i} = f32[{i}]{{0}} iota(), iota_dimension=0" for i in range(1, 61)]
    text = str(collectives_of([*made, *varied]))
    assert "... and 20 more rows" in text


def test_html_shows_the_same_and_escapes():
    lines = [line.replace("jit(f)/add", "jit(f)/<b>add") for line in LINES]
    html = collectives_of(lines, conflicts=[CONFLICT])._repr_html_()
    assert "model.py:5 &lt;b&gt;add" in html
    assert html.index("implicit resharding") < html.index("parameter gathers")
    assert "conflict: f32[8] copy" in html
    assert "<b>no collectives" in collectives_of(["ROOT %x = f32[] parameter(0)"])._repr_html_()


def test_json_holds_every_entry():
    found = collectives_of(LINES, conflicts=[CONFLICT])
    data = json.loads(json.dumps(found.to_json()))
    assert [entry["kind"] for entry in data["collectives"]] == [entry.kind for entry in found]
    first = data["collectives"][0]
    assert first["axes"] == [{"name": "tp", "members": 4, "size": 4}]
    assert first["source"] == {"file": "/me/model.py", "line": 3, "function": ""}
    assert first["times"] == {"count": 1, "at_most": False, "at_least": False}
    assert data["seconds"] == pytest.approx(sum(e["total_seconds"] for e in data["collectives"]))
    assert list(data["causes"]) == [
        "implicit resharding",
        "parameter gathers",
        "activation exchanges",
    ]
    assert data["conflicts"][0]["after"] == "{replicated}"


def test_reprs_are_short():
    collectives = collectives_of(LINES, conflicts=[CONFLICT])
    assert repr(collectives).startswith("<Collectives 4 collectives: a device sends 4.012 MiB")
    expected = "<Collective all-reduce of f32[512,512] over tp from model.py:3>"
    assert repr(collectives[0]) == expected
    conflict = ShardingConflict(
        "copy" * 20, "f32[8]", "{devices=[4]<=[4]} " * 9, "{replicated} " * 9
    )
    assert len(repr(conflict)) <= 200
