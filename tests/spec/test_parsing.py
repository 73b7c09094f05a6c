"""What people may write, and what each slip is told."""

import collections
import dataclasses
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from meshwright.errors import SpecError
from meshwright.spec.mesh_spec import AxisSpec, MeshSpec

parse = MeshSpec.parse

# Every printable character that a spec's text does not use itself.
letters = st.characters(exclude_categories=["C", "Z"], exclude_characters=":=,*")
names = st.text(letters, min_size=1, max_size=12).filter(
    lambda name: name.isprintable() and not any(c.isspace() for c in name)
)


@st.composite
def specs(draw: st.DrawFn) -> MeshSpec:
    axes = []
    fast_open = slow_open = False
    for name in draw(st.lists(names, min_size=1, max_size=6, unique=True)):
        fast = draw(st.sampled_from([1, 2, 3, 8] + [-1] * (not fast_open)))
        slow = draw(st.sampled_from([None, None, 1, 2, 5] + [-1] * (not slow_open)))
        fast_open, slow_open = fast_open or fast == -1, slow_open or slow == -1
        kind = draw(st.sampled_from([None, "auto", "explicit", "manual"]))
        axes.append(AxisSpec(name, fast, slow, kind))
    return MeshSpec(tuple(axes))


@given(specs())
@settings(deadline=None)
def test_a_spec_survives_its_own_text(spec: MeshSpec) -> None:
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)


@given(specs(), st.data())
@settings(deadline=None)
def test_spaces_anywhere_between_the_parts_change_nothing(spec: MeshSpec, data: Any) -> None:
    text = str(spec).replace(" ", "")
    blank = st.sampled_from(["", " ", "  ", "\t", "\n "])
    spaced = "".join(data.draw(blank) + c + data.draw(blank) if c in ":,*" else c for c in text)
    assert parse(f" {spaced} ") == spec


@given(specs())
@settings(deadline=None)
def test_dicts_and_pairs_say_the_same_as_text(spec: MeshSpec) -> None:
    untyped = spec.with_types([None] * len(spec.axes))
    pairs = [(a.name, a.fast if a.slow is None else (a.slow, a.fast)) for a in spec.axes]
    assert parse(dict(pairs)) == parse(pairs) == parse([list(p) for p in pairs]) == untyped


def test_the_longest_spec_survives_its_own_text() -> None:
    sizes = [(2**31 - 1, 2**31 - 1)] * 31 + [(1, -1)]
    spec = parse(sizes, names=[f"{i:0>100}" for i in range(32)]).with_types("explicit")
    assert parse(str(spec)) == spec


def test_every_form_gives_the_same_spec() -> None:
    wanted = MeshSpec((AxisSpec("dp", 2), AxisSpec("tp", 4)))
    for form in (
        "dp:2,tp:4",
        "dp:2, tp:4",
        " dp : 2 ,\ttp : 4 ",
        "dp=2,tp=4",
        "dp=2, tp:4",
        {"dp": 2, "tp": 4},
        collections.OrderedDict(dp=2, tp=4),
        types.MappingProxyType({"dp": 2, "tp": 4}),
        [("dp", 2), ("tp", 4)],
        (["dp", 2], ["tp", 4]),
        wanted,
    ):
        assert parse(form) == wanted
    for sizes in ("2,4", " 2 , 4 ", (2, 4), [2, 4], np.array([2, 4])):
        assert parse(sizes, names=("dp", "tp")) == wanted
        assert parse(sizes, names=["dp", "tp"]) == wanted


def test_a_spec_passes_through_untouched() -> None:
    spec = parse("dp:2")
    assert parse(spec) is spec


def test_the_order_of_the_axes_is_the_order_given() -> None:
    assert parse("z:1, a:2, m:3").names == ("z", "a", "m")
    assert parse({"z": 1, "a": 2}).sizes == (1, 2)


def test_an_axis_spans_both_networks_as_slow_times_fast() -> None:
    axis = parse("fsdp:2*8").axes[0]
    assert (axis.slow, axis.fast, axis.size) == (2, 8, 16)
    assert parse({"fsdp": (2, 8)}) == parse([("fsdp", [2, 8])]) == parse("fsdp: 2 * 8")
    assert parse([(2, 8)], names=["fsdp"]) == parse("fsdp:2*8")


def test_size_is_open_while_any_part_of_it_is() -> None:
    assert parse("a:-1*4").sizes == (-1,)
    assert parse("a:4*-1").sizes == (-1,)
    assert parse("a:-1*4, b:2").size is None
    assert parse("a:2*4, b:2").size == 16


def test_types_are_written_after_the_size() -> None:
    assert parse("dp:2, tp:4:explicit, sp:2*1:MANUAL").types == (None, "explicit", "manual")


def test_numpy_integers_are_integers() -> None:
    spec = parse({"dp": np.int64(2), "tp": np.uint8(4)})
    assert spec.sizes == (2, 4)
    assert all(type(axis.fast) is int for axis in spec.axes)


def test_names_may_be_any_printable_text() -> None:
    assert parse("größe:2, 並列:4, 2:2, _x.y-z/0:1").names == ("größe", "並列", "2", "_x.y-z/0")


def test_specs_are_values() -> None:
    assert parse("dp:2") == parse({"dp": 2})
    assert len({parse("dp:2"), parse("dp=2"), parse({"dp": np.int32(2)})}) == 1
    assert MeshSpec([AxisSpec("dp", 2)]) == parse("dp:2")  # type: ignore[arg-type]
    assert hash(MeshSpec([AxisSpec("dp", 2)])) == hash(parse("dp:2"))  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError, match="axes"):
        parse("dp:2").axes = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("dp:-1, tp:-1", r"^-1 appears 2 times \(axes dp, tp\)"),
        ("dp:-1*2, tp:-1*2", r"-1 appears 2 times over DCN \(axes dp, tp\)"),
        ({"a": -1, "b": -1, "c": -1}, r"^-1 appears 3 times \(axes a, b, c\)"),
        ("dp:0", "axis 'dp': size 0 is not allowed. Use a positive integer, or -1"),
        ({"dp": 0}, "axis 'dp': size 0 is not allowed"),
        ("dp:-0", "axis 'dp': size 0 is not allowed"),
        ("dp:2*0", "axis 'dp': size 0 is not allowed"),
        ("dp:-2", "axis 'dp': size -2 is not allowed"),
        ({"dp": -2, "tp": 4}, "axis 'dp': size -2 is not allowed"),
        ({"dp": 2.0}, "axis 'dp': size 2.0 is a float, not an integer"),
        ({"dp": float("nan")}, "axis 'dp': size nan is a float, not an integer"),
        ({"dp": np.float64(2)}, "axis 'dp': size .* is a float64, not an integer"),
        ("dp:2.0", "'dp:2.0': '2.0' is not a size"),
        ("dp:1e3", "'1e3' is not a size"),
        ({"dp": True}, "axis 'dp': size True is a bool, not an integer"),
        ({"dp": np.True_}, "axis 'dp': size .*True.* is a bool.*, not an integer"),
        ({"dp": (True, 2)}, "axis 'dp': size True is a bool"),
        ({"dp": "2"}, "axis 'dp': size '2' is a str, not an integer"),
        ({"dp": None}, "axis 'dp': size None is a NoneType, not an integer"),
        ({"dp": (2, 2, 2)}, r"axis 'dp': \(2, 2, 2\) is not a \(slow, fast\) pair"),
        ({"dp": ()}, r"axis 'dp': \(\) is not a \(slow, fast\) pair"),
        ("dp:two", "'dp:two': 'two' is not a size"),
        ("dp:", "'dp:': '' is not a size"),
        ("dp:+2", r"'\+2' is not a size"),
        ("dp:2_0", "'2_0' is not a size"),
        ("dp:\N{ARABIC-INDIC DIGIT THREE}", "is not a size"),
        ("dp:2*", "'' is not a size"),
        ("dp:2*2*2", r"'2\*2' is not a size"),
        ("dp:2147483648", "axis 'dp': size 2147483648 is more than 2147483647"),
        ("dp:" + "9" * 300, "'dp:999.* size '999.* is far too large"),
        ({"dp": 2**40}, "axis 'dp': size 1099511627776 is more than 2147483647"),
        ({"dp": 10**5000}, "axis 'dp': size <int whose repr raised ValueError> is more than"),
        ("a:65536, b:65536", "the sizes multiply to 4294967296 devices, more than 2147483647"),
        ("", "the spec is empty. Write e.g. 'dp:2, fsdp:-1, tp:4'"),
        (" \n", "the spec is empty"),
        ({}, "the spec has no axes. Name at least one, e.g. 'dp:-1'"),
        ([], "the spec has no axes"),
        ("dp:2,,tp:4", "an entry of 'dp:2,,tp:4' is empty .a comma too many"),
        ("dp:2,", "is empty .a comma too many"),
        (":2", "':2' is not name:size"),
        ("dp", "'dp' is not name:size"),
        ("dp 2", "'dp 2' is not name:size"),
        ("2,4", "'2' is not name:size"),
        ("dp:2:auto:auto", "is not name:size"),
        ("dp:2:autoo", "axis 'dp': type 'autoo' is not one of auto, explicit, manual"),
        ("dp:2;tp:4", "axis 'dp': type '4' is not one of"),
        ({"": 2}, "an axis name is empty. Give every axis a name"),
        ("dp:2, dp:4", "axis 'dp' appears twice. Give every axis a name of its own"),
        ([("dp", 2), ("dp", 2)], "axis 'dp' appears twice"),
        ({"d\x00p": 2}, r"axis name 'd\\x00p' has a character that does not print"),
        ("d\u200bp:2", r"axis name 'd\\u200bp' has a character that does not print"),
        ("\ud800:2", r"axis name '\\ud800' has a character that does not print"),
        ({"d p": 2}, "axis name 'd p' has .* a space"),
        ({"d:p": 2}, r"axis name 'd:p' has .* one of : = , \*"),
        ("d*p:2", r"axis name 'd\*p' has .* one of : = , \*"),
        ({"x" * 101: 2}, "has 101 characters; at most 100"),
        ({3: 2}, "axis name 3 is a int, not a string"),
        ({b"dp": 2}, "axis name b'dp' is a bytes, not a string"),
        ({None: 2}, "axis name None is a NoneType, not a string"),
        ((2, 4), r"\(2, 4\): sizes without names. Pass names="),
        ([("dp", 2, "auto")], "sizes without names. .* or pairs"),
        (np.array([[2, 4]]), "sizes without names"),
        (8, "cannot read a mesh spec from 8. Write e.g. 'dp:2, fsdp:-1, tp:4'"),
        (None, "cannot read a mesh spec from None"),
        (b"dp:2", "cannot read a mesh spec from b'dp:2'"),
        ({"dp", "tp"}, "cannot read a mesh spec from {"),
        (np.array(8), r"cannot read a mesh spec from array\(8\)"),
        (object(), "cannot read a mesh spec from <object"),
        pytest.param("a:1," * 3000, "the spec has 12000 characters; at most 10000", id="long"),
        pytest.param(",".join(f"a{i}:1" for i in range(65)), "65 axes; at most 32", id="many"),
        ({f"a{i}": 1 for i in range(65)}, "65 axes; at most 32"),
        ([(f"a{i}", 1) for i in range(65)], "65 axes; at most 32"),
    ],
)
def test_a_slip_is_named(bad: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(bad)


@pytest.mark.parametrize(
    ("value", "given_names", "message"),
    [
        ((2, 4), ("dp",), r"2 sizes for 1 names \('dp'\). Give one size per name"),
        ("2", ["dp", "tp"], r"1 sizes for 2 names \('dp', 'tp'\)"),
        ((), (), "the spec has no axes"),
        ((2, 4), ("dp", "dp"), "axis 'dp' appears twice"),
        ((2, 4), "dp", "names: 'dp' is not a list or tuple of axis names"),
        ((2, 4), {"dp": 2, "tp": 4}, "names: {.*} is not a list or tuple of axis names"),
        ((2, 4), ("dp", ""), "an axis name is empty"),
        ((2, 4), ("dp", 3), "axis name 3 is a int"),
        ("2,x", ("dp", "tp"), "'x': 'x' is not a size"),
        ({"dp": 2}, ("dp",), "names were given beside a dict, which has names of its own"),
        (MeshSpec.parse("dp:2"), ("dp",), "names were given beside a MeshSpec"),
        ("dp:2", ("tp",), "names were given beside 'dp:2', which has names of its own"),
        ("2, tp:4", ("dp", "tp"), "names were given beside '2, tp:4'"),
    ],
)
def test_names_that_do_not_go_with_the_sizes_are_refused(
    value: Any, given_names: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        parse(value, names=given_names)


@pytest.mark.parametrize("bad", [None, "dp", ["dp"], [None], AxisSpec("dp", 2), 5])
def test_a_mesh_spec_is_made_of_axis_specs(bad: Any) -> None:
    with pytest.raises(SpecError, match=r"is not a tuple of AxisSpec\. Use MeshSpec\.parse"):
        MeshSpec(bad)


def test_a_mesh_spec_needs_an_axis() -> None:
    with pytest.raises(SpecError, match="the spec has no axes"):
        MeshSpec(())


def test_an_axis_spec_checks_itself() -> None:
    with pytest.raises(SpecError, match="an axis name is empty"):
        AxisSpec("", 2)
    with pytest.raises(SpecError, match="axis 'dp': size 0 is not allowed"):
        AxisSpec("dp", 2, slow=0)
    with pytest.raises(SpecError, match="axis 'dp': type 'fast' is not an AxisType or one of"):
        AxisSpec("dp", 2, type="fast")


def test_types_go_to_all_axes_to_each_or_by_name() -> None:
    spec = parse("dp:2, tp:4")
    assert spec.with_types(None) is spec
    assert spec.with_types("explicit").types == ("explicit", "explicit")
    assert spec.with_types(AxisType.Manual).types == ("manual", "manual")
    assert spec.with_types("Auto").types == ("auto", "auto")
    assert spec.with_types(("auto", AxisType.Explicit)).types == ("auto", "explicit")
    assert spec.with_types([None, "manual"]).types == (None, "manual")
    assert spec.with_types({"tp": "explicit"}).types == (None, "explicit")


def test_types_by_name_leave_the_others_alone() -> None:
    assert parse("dp:2:manual, tp:4").with_types({"tp": "auto"}).types == ("manual", "auto")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("explict", r"axis 'dp': type 'explict' .* Did you mean 'explicit'\?"),
        (3, "axis 'dp': type 3 is not an AxisType or one of auto, explicit, manual"),
        (True, "axis 'dp': type True is not an AxisType"),
        (np.array(["auto", "auto"]), "axis 'dp': type array.* is not an AxisType"),
        (("auto",), r"axis_types has 1 entry for 2 axes \(dp, tp\). Give one per axis"),
        (["auto"] * 3, "axis_types has 3 entries for 2 axes"),
        (("auto", "fast"), "axis 'tp': type 'fast' is not"),
        ({"pt": "auto"}, "axis_types: no axis 'pt' in dp, tp. Did you mean"),
        ({3: "auto"}, "axis_types: no axis 3 in dp, tp"),
    ],
)
def test_bad_types_are_named(bad: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse("dp:2, tp:4").with_types(bad)


def test_repr_says_the_spec_and_fits_in_200_characters() -> None:
    assert repr(MeshSpec.parse("dp:2,fsdp=-1")) == "<MeshSpec dp:2, fsdp:-1>"
    assert repr(AxisSpec("tp", 4, slow=2, type="manual")) == "<AxisSpec tp:2*4:manual>"
    longest = MeshSpec.parse({f"{i:\\>100}": 1 for i in range(32)})
    assert len(repr(longest)) == 200
    assert all(len(repr(axis)) <= 200 for axis in longest.axes)
