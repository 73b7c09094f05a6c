"""What an axis name means, and how much it weighs."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.axes import ROLES, axis_weights, intensities, meant_name, role


def test_the_five_contract_names_have_their_roles() -> None:
    said = {name: role(name).description for name in ("dp", "fsdp", "ep", "tp", "sp")}
    assert said == {
        "dp": "model replicated, data split",
        "fsdp": "model and data both split",
        "ep": "experts split",
        "tp": "tensors split",
        "sp": "sequence split",
    }


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("data", "dp"),
        ("batch", "dp"),
        ("model", "tp"),
        ("tensor", "tp"),
        ("expert", "ep"),
        ("seq", "sp"),
        ("context", "cp"),
        ("stage", "pp"),
        ("mpmd", "pp"),
        ("shard", "fsdp"),
    ],
)
def test_other_words_for_the_same_axis_mean_the_same(name: str, same: str) -> None:
    assert role(name) is role(same)


def test_names_of_your_own_are_custom() -> None:
    assert role("banana").name == "custom"
    assert role("TP").name == "custom"


def test_tensors_talk_most_and_pipelines_least() -> None:
    ranked = sorted(("pp", "dp", "fsdp", "ep", "tp"), key=lambda name: role(name).intensity)
    assert ranked == ["pp", "dp", "fsdp", "ep", "tp"]


def test_pipelines_and_ring_attention_alone_talk_to_neighbours() -> None:
    assert {role.name for role in ROLES.values() if role.neighbours} == {"pipeline", "context"}


def test_a_role_is_a_frozen_value() -> None:
    assert hash(role("dp")) == hash(role("data"))
    with pytest.raises(AttributeError, match="cannot assign to field"):
        role("dp").intensity = 5.0  # type: ignore[misc]


def test_unknown_names_double_from_left_to_right() -> None:
    assert intensities(["a", "b", "tp", "c"]) == (1.0, 2.0, 12.0, 4.0)


def test_unknown_names_stop_doubling() -> None:
    many = intensities([f"x{i}" for i in range(64)])
    assert many[-1] == many[8] == 256.0


def test_an_intensity_of_your_own_counts() -> None:
    assert intensities(["dp", "tp"], {"dp": 5}) == (5.0, 12.0)
    assert intensities(["dp", "tp"], {"tp": Fraction(1, 2)}) == (1.0, 0.5)
    assert intensities(["dp"], {"dp": np.float32(2)}) == (2.0,)
    assert intensities(["dp"], {"dp": 0}) == (0.0,)
    assert intensities(["dp"], {}) == intensities(["dp"], None) == (1.0,)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, "12", None, True, 1j, [1]])
def test_a_bad_intensity_names_the_axis(bad: Any) -> None:
    with pytest.raises(
        mw.errors.SpecError, match=r"intensity of axis 'dp': .* is not a finite number"
    ):
        intensities(["dp"], {"dp": bad})


def test_an_intensity_for_an_unknown_axis_names_the_near_one() -> None:
    with pytest.raises(
        mw.errors.SpecError, match=r"intensity: no axis 'ttp' in dp, tp\. Did you mean 'tp'\?"
    ):
        intensities(["dp", "tp"], {"ttp": 1})


def test_gradients_shrink_with_the_axes_that_cut_weights() -> None:
    assert axis_weights(["dp", "fsdp", "tp"], [2, 8, 4]) == (1 / 32, 3 / 4, 12.0)


def test_activations_do_not_shrink() -> None:
    assert (
        axis_weights(["tp", "fsdp"], [4, 1])[0] == axis_weights(["tp", "fsdp"], [4, 64])[0] == 12.0
    )


def test_an_axis_does_not_cut_its_own_weights() -> None:
    assert axis_weights(["fsdp"], [64]) == (3.0,)


def test_sequence_axes_do_not_cut_weights() -> None:
    assert axis_weights(["dp", "sp"], [2, 64])[0] == axis_weights(["dp"], [2])[0]


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("fdsp", "fsdp"),
        ("ftsp", "fsdp"),
        ("fsdpp", "fsdp"),
        ("tesnor", "tensor"),
        ("modle", "model"),
        ("modl", "model"),
        ("expret", "expert"),
        ("sequnce", "sequence"),
        ("stgae", "stage"),
        ("mpdm", "mpmd"),
    ],
)
def test_a_slip_of_a_known_name_is_recognised(slip, meant):
    assert meant_name(slip) == meant


OWN = "a b x y rp xp tpu cpu pt dq batch2 data_1 fsdp2 models stages patch state mode node banana"


@pytest.mark.parametrize("name", [*OWN.split(), *ROLES, "FSDP", "replica_fsdp", 3])
def test_names_of_your_own_are_no_slips(name):
    assert meant_name(name) is None
