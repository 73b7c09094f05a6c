"""Filling -1, and the part of each axis that crosses DCN."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import SpecError
from meshwright.spec.mesh_spec import MeshSpec

parse = MeshSpec.parse


def test_minus_one_takes_the_devices_that_are_left() -> None:
    assert str(parse("dp:2, fsdp:-1, tp:4").resolve(64)) == "dp:2, fsdp:8, tp:4"
    assert parse("dp:-1").resolve(1).sizes == (1,)
    assert parse("dp:2, tp:-1").resolve(np.int64(8)).sizes == (2, 4)


def test_a_full_spec_resolves_to_itself() -> None:
    assert parse("dp:2, tp:4").resolve(8) == parse("dp:2, tp:4")


def test_minus_one_inside_takes_what_is_left_of_each_slice() -> None:
    assert str(parse("dp:2*-1, tp:4").resolve(64, slices=2)) == "dp:2*8, tp:4"


def test_minus_one_outside_takes_what_is_left_of_the_slices() -> None:
    spec = parse("dp:-1*1, fsdp:2*2, tp:4")
    assert str(spec.resolve(64, slices=8)) == "dp:4*1, fsdp:2*2, tp:4"


def test_both_networks_may_have_one_open_axis() -> None:
    assert str(parse("dp:-1*1, fsdp:-1").resolve(64, slices=4)) == "dp:4*1, fsdp:16"
    assert str(parse("dp:-1*-1").resolve(64, slices=4)) == "dp:4*16"


def test_types_survive_resolving() -> None:
    assert parse("dp:-1:explicit, tp:2").resolve(8).types == ("explicit", None)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.data(),
)
def test_the_resolved_sizes_always_multiply_to_the_devices(
    sizes: list[int], per_slice: int, slices: int, data: Any
) -> None:
    names = [f"a{i}" for i in range(len(sizes))]
    devices = math.prod(sizes) * per_slice * slices
    open_at = data.draw(st.integers(0, len(sizes) - 1))
    asked = [(1, -1) if i == open_at else size for i, size in enumerate(sizes)]
    resolved = parse(asked, names=names).resolve(devices, slices=slices)
    assert math.prod(resolved.sizes) == devices
    assert all(
        got == size
        for i, (got, size) in enumerate(zip(resolved.sizes, sizes, strict=True))
        if i != open_at
    )


@pytest.mark.parametrize(
    ("spec", "devices", "slices", "message"),
    [
        ("dp:2, tp:4", 6, None, "Not enough devices: 'dp:2, tp:4' needs 8, there are 6"),
        ("dp:16", 8, None, r"Make the sizes multiply to 8 \(largest common part: 8\)"),
        ("dp:2", 8, None, "'dp:2' uses 2 of 8 devices. .* or put -1 on one axis"),
        ("dp:3", 8, None, r"uses 3 of 8 devices. Make the sizes multiply to 8 \(largest"),
        (
            "dp:3, tp:-1",
            8,
            None,
            "'dp:3, tp:-1': the sizes given multiply to 3, which does not divide 8 devices, "
            "so -1 for 'tp' cannot be inferred",
        ),
        ("dp:16, tp:-1", 8, None, "multiply to 16, which does not divide 8 devices"),
        ("dp:-1", 8, 3, "8 devices do not form 3 equal slices"),
        ("dp:-1*1", 8, None, r"'dp' takes what is left over DCN: .*slices="),
        ("dp:-1*1, tp:3*1", 8, 2, "DCN parts given multiply to 3, which does not divide 2"),
        ("dp:4*2", 8, 2, "'dp:4.2' spans 4 parts over DCN, but there are 2"),
        ("dp:2*4", 8, 1, "spans 2 parts over DCN, but there is 1 .slices, hosts"),
        ("dp:-1", 0, None, "devices: 0 is not a positive integer"),
        ("dp:-1", -8, None, "devices: -8 is not a positive integer"),
        ("dp:-1", 8.0, None, "devices: 8.0 is not a positive integer"),
        ("dp:-1", True, None, "devices: True is not a positive integer"),
        ("dp:-1", "8", None, "devices: '8' is not a positive integer"),
        ("dp:-1", None, None, "devices: None is not a positive integer"),
        pytest.param(
            "dp:8", 10**5000, None, "devices: <int whose repr raised ValueError> is more", id="huge"
        ),
        ("dp:-1", 2**31, None, "devices: 2147483648 is more than 2147483647"),
        ("dp:-1", 8, 0, "slices: 0 is not a positive integer"),
        ("dp:-1", 8, "2", "slices: '2' is not a positive integer"),
    ],
)
def test_what_does_not_fit_says_by_how_much(
    spec: str, devices: Any, slices: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        parse(spec).resolve(devices, slices)


def test_with_dcn_keeps_every_size() -> None:
    spec = parse("dp:4, fsdp:16, tp:2")
    for dcn in ((2, 4, 1), [2, 4, 1], {"dp": 2, "fsdp": 4}, "dp:2, fsdp:4", "fsdp=4,dp=2"):
        spread = spec.with_dcn(dcn)
        assert spread.sizes == spec.sizes
        assert [axis.slow for axis in spread.axes] == [2, 4, 1]
    assert str(spec.with_dcn("dp:2, fsdp:4")) == "dp:2*2, fsdp:4*4, tp:1*2"


def test_with_dcn_none_leaves_the_split_free() -> None:
    spec = parse("dp:4")
    assert spec.with_dcn(None) is spec


def test_with_dcn_minus_one_takes_what_is_left_of_the_slices() -> None:
    assert str(parse("dp:2, fsdp:16").with_dcn((2, -1), slices=8)) == "dp:2*1, fsdp:4*4"
    assert str(parse("dp:2, fsdp:16").with_dcn({"fsdp": -1}, slices=2)) == "dp:1*2, fsdp:2*8"


def test_with_dcn_on_an_open_axis_fixes_the_slow_part_alone() -> None:
    spread = parse("dp:-1, tp:4").with_dcn({"dp": 2})
    assert str(spread) == "dp:2*-1, tp:1*4"
    assert spread.resolve(64, slices=2).sizes == (16, 4)


def test_with_dcn_agrees_with_what_the_spec_says() -> None:
    spec = parse("dp:2*4")
    assert spec.with_dcn({"dp": 2}) == spec
    with pytest.raises(SpecError, match="'dp': the spec says 2 over DCN, dcn says 4"):
        spec.with_dcn({"dp": 4})


def test_with_dcn_keeps_the_types() -> None:
    assert parse("dp:4:explicit").with_dcn((2,)).types == ("explicit",)


@pytest.mark.parametrize(
    ("dcn", "slices", "message"),
    [
        ((3, 1), None, "axis 'dp': dcn 3 does not divide its size 4. Use one of 1, 2, 4"),
        ((8, 1), None, "axis 'dp': dcn 8 does not divide its size 4"),
        ((2,), None, r"dcn has 1 entry for 2 axes \(dp, tp\). Give one per axis"),
        ((2, 1, 1), None, "dcn has 3 entries for 2 axes"),
        ({"ddp": 2}, None, r"dcn: no axis 'ddp' in dp, tp. Did you mean 'dp'\?"),
        ("fsdp:2", None, "dcn: no axis 'fsdp' in dp, tp"),
        ("dp:1*2", None, "dcn: 'dp:1.2' says more than name:size"),
        ("dp:2:auto", None, "dcn: 'dp:2:auto' says more than name:size"),
        (2, None, "dcn: 2 is not a dict, a sequence or a string like 'dp:2'"),
        ({2, 1}, None, "dcn: {1, 2} is not a dict"),
        ((0, 1), None, "axis 'dp': size 0 is not allowed"),
        ((-2, 1), None, "axis 'dp': size -2 is not allowed"),
        ((2.0, 1), None, "axis 'dp': size 2.0 is a float"),
        ((True, 1), None, "axis 'dp': size True is a bool"),
        (("2", 1), None, "axis 'dp': size '2' is a str"),
        ((-1, 1), None, "axis 'dp': dcn -1 takes what is left of the slices: say how many"),
        ((-1, -1), 4, "axis 'dp': dcn -1 takes what is left of the slices"),
        ((-1, 3), 4, "dcn: the parts given multiply to 3, which does not divide 4 slices"),
        ((-1, 1), 0, "slices: 0 is not a positive integer"),
        ((-1, 1), "4", "slices: '4' is not a positive integer"),
        ((-1, 1), True, "slices: True is not a positive integer"),
    ],
)
def test_a_dcn_that_does_not_fit_is_refused(dcn: Any, slices: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse("dp:4, tp:4").with_dcn(dcn, slices)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5),
)
def test_with_dcn_splits_any_size_its_parts_divide(parts: list[tuple[int, int]]) -> None:
    names = [f"a{i}" for i in range(len(parts))]
    spec = parse([slow * fast for slow, fast in parts], names=names)
    spread = spec.with_dcn([slow for slow, _ in parts])
    assert [(axis.slow, axis.fast) for axis in spread.axes] == parts
    assert spread.sizes == spec.sizes
