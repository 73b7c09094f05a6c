"""`parse_mesh_from_string`: named or by position, every slip a ValueError."""

import inspect
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh

import meshwright as mw

parse = mw.parse_mesh_from_string


def test_the_signature_is_the_contract() -> None:
    assert list(inspect.signature(parse).parameters) == ["axis_dims", "names"]


def test_sizes_by_position_follow_the_names() -> None:
    mesh = parse("2,4", ["data", "model"])
    assert isinstance(mesh, Mesh)
    assert list(mesh.shape.items()) == [("data", 2), ("model", 4)]


def test_named_sizes_stand_for_themselves() -> None:
    assert list(parse("dp:2,tp:4", ["dp", "tp"]).shape.items()) == [("dp", 2), ("tp", 4)]


def test_named_sizes_keep_the_order_of_the_string() -> None:
    assert list(parse("tp:4,dp:2", ["dp", "tp"]).shape.items()) == [("tp", 4), ("dp", 2)]


def test_known_fault_a_space_was_mishandled() -> None:
    assert parse("dp:2, tp:4", ["dp", "tp"]) is parse("dp:2,tp:4", ["dp", "tp"])
    assert parse(" 2 , 4 ", ["dp", "tp"]) is parse("2,4", ("dp", "tp"))


def test_minus_one_takes_what_is_left() -> None:
    assert dict(parse("dp:2,tp:-1", ["dp", "tp"]).shape) == {"dp": 2, "tp": 4}
    assert dict(parse("-1,2", ["dp", "tp"]).shape) == {"dp": 4, "tp": 2}


def test_axis_types_may_be_written_too() -> None:
    mesh = parse("dp:2, tp:4:explicit", ["dp", "tp"])
    assert mesh.axis_types == (AxisType.Auto, AxisType.Explicit)


def test_the_mesh_is_the_one_create_mesh_gives() -> None:
    assert parse("2,4", ("dp", "tp")) is mw.create_mesh((2, 4), ("dp", "tp"))
    assert set(parse("8", ("dp",)).devices.flat) == set(jax.devices())


def test_a_part_over_the_slow_network_is_not_forgotten() -> None:
    assert dict(parse("dp:1*2, tp:1*4", ["dp", "tp"]).shape) == {"dp": 2, "tp": 4}
    with pytest.raises(mw.errors.SpecError, match="spans 2 parts over DCN, but there is 1"):
        parse("dp:2*1, tp:4", ["dp", "tp"])


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("dp:2,xp:4", ["dp", "tp"], "unknown axis 'xp' in 'dp:2,xp:4': names are 'dp', 'tp'"),
        ("dpp:8", ["dp"], r"unknown axis 'dpp' .* Did you mean 'dp'\?"),
        ("dp:8", [], "unknown axis 'dp'"),
        ("dp:8", ["dp", "tp"], "'dp:8' lacks 'tp'. Give every name a size"),
        ("dp:2,dp:4", ["dp"], "axis 'dp' appears twice"),
        ("dp:2,tp:4", ["dp", "tp", "dp"], "axis 'dp' appears twice"),
        ("2,4", ["dp", "dp"], "axis 'dp' appears twice"),
        ("2,4", ["dp"], "2 sizes for 1 names"),
        ("8", ["dp", "tp"], "1 sizes for 2 names"),
        ("2,tp:4", ["dp", "tp"], "'2' is not name:size"),
        ("", ["dp"], "the spec is empty"),
        ("2,,4", ["dp", "tp"], "a comma too many"),
        ("two,4", ["dp", "tp"], "'two' is not a size"),
        ("2.0,4", ["dp", "tp"], "'2.0' is not a size"),
        ("-2,4", ["dp", "tp"], "axis 'dp': size -2 is not allowed"),
        ("-1,-1", ["dp", "tp"], "-1 appears 2 times"),
        ("0,8", ["dp", "tp"], "axis 'dp': size 0 is not allowed"),
        ("4,4", ["dp", "tp"], "Not enough devices: 'dp:4, tp:4' needs 16, there are 8"),
        ("3,-1", ["dp", "tp"], "multiply to 3, which does not divide 8 devices"),
        ("dp:2:fast,tp:4", ["dp", "tp"], "type 'fast' is not one of"),
        ("2,4", "dp", "names: 'dp' is not a list or tuple"),
        ("2,4", {"dp", "tp"}, "names: {.*} is not a list or tuple"),
        ("2,4", None, "names: None is not a list or tuple"),
        ("2,4", ["dp", 3], "axis name 3 is a int, not a string"),
        ("dp:8", ["dp", []], r"axis name \[\] is a list, not a string"),
        (b"2,4", ["dp", "tp"], "axis_dims: b'2,4' is not a string such as '2,4'"),
        ((2, 4), ["dp", "tp"], r"axis_dims: \(2, 4\) is not a string"),
        (None, ["dp"], "axis_dims: None is not a string"),
    ],
)
def test_every_slip_is_a_value_error(text: Any, names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(text, names)
    assert isinstance(caught.value, mw.errors.MeshwrightError)
