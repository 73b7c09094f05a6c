"""`calculate_host_mesh_shape`: this host's share of a global mesh."""

import inspect
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw

share = mw.calculate_host_mesh_shape


def test_the_signature_is_the_contract() -> None:
    said = {name: p.default for name, p in inspect.signature(share).parameters.items()}
    assert list(said) == ["global_mesh_shape", "total_devices", "num_processes"]
    assert said["total_devices"] is said["num_processes"] is None


def test_the_example_of_the_contract() -> None:
    assert share((2, 4), total_devices=4, num_processes=2) == (1, 4)


def test_known_fault_three_by_four_on_two_processes_was_refused() -> None:
    assert share((3, 4), total_devices=6, num_processes=2) == (3, 2)


@pytest.mark.parametrize(
    ("shape", "local", "processes", "wanted"),
    [
        ((8,), 8, 1, (8,)),
        ((8,), 1, 8, (1,)),
        ((4, 2), 2, 4, (1, 2)),
        ((2, 2, 2), 2, 4, (1, 1, 2)),
        ((2, 3, 4), 4, 6, (1, 1, 4)),
        ((5, 6), 10, 3, (5, 2)),
        ((1, 16, 1, 4), 8, 8, (1, 2, 1, 4)),
        ((6, 4), 4, 6, (1, 4)),
        ((4, 6), 4, 6, (2, 2)),
    ],
)
def test_leading_axes_are_split_first(
    shape: tuple[int, ...], local: int, processes: int, wanted: tuple[int, ...]
) -> None:
    assert share(shape, local, processes) == wanted


def test_the_defaults_are_this_process() -> None:
    assert (jax.local_device_count(), jax.process_count()) == (8, 1)
    assert share((2, 4)) == (2, 4)
    assert share((2, 8), num_processes=2) == (1, 8)
    assert share((2, 2), total_devices=4) == (2, 2)


def test_any_sequence_and_numpy_integers_are_fine() -> None:
    assert share([2, 4], np.int64(4), np.int32(2)) == (1, 4)
    assert share(np.array([2, 4]), 4, 2) == (1, 4)
    assert all(type(size) is int for size in share(np.array([2, 4]), 4, 2))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.data())
def test_every_mesh_that_matches_the_devices_has_a_share(sizes: list[int], data: Any) -> None:
    total = math.prod(sizes)
    processes = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
    local = share(sizes, total // processes, processes)
    assert math.prod(local) == total // processes
    assert all(size % part == 0 for size, part in zip(sizes, local, strict=True))


@pytest.mark.parametrize(
    ("shape", "local", "processes", "message"),
    [
        (
            (2, 4),
            4,
            3,
            r"mesh \(2, 4\) has 8 devices, but 3 processes with 4 local devices each have 12",
        ),
        ((3, 4), 4, 2, r"mesh \(3, 4\) has 12 devices, but 2 processes .* Make the two equal"),
        ((2, -1), 4, 2, r"mesh \(2, -1\): sizes must be known here, not -1"),
        ((-1, -1), 4, 2, "-1 appears 2 times"),
        ((-2, -4), 4, 2, "axis 'dim0': size -2 is not allowed"),
        ((0, 4), 4, 2, "axis 'dim0': size 0 is not allowed"),
        ((2.0, 4), 4, 2, "axis 'dim0': size 2.0 is a float"),
        ((2, True), 4, 2, "axis 'dim1': size True is a bool"),
        (("2", "4"), 4, 2, "axis 'dim0': size '2' is a str"),
        ((), 1, 1, "the spec has no axes"),
        ("24", 4, 2, "global_mesh_shape: '24' is not a list or tuple"),
        (8, 4, 2, "global_mesh_shape: 8 is not a list or tuple"),
        (None, 4, 2, "global_mesh_shape: None is not a list or tuple"),
        ({2: "dp", 4: "tp"}, 4, 2, "global_mesh_shape: {.*} is not a list or tuple"),
        ((2, 4), 0, 2, "total_devices: 0 is not a positive integer"),
        ((2, 4), -4, -2, "total_devices: -4 is not a positive integer"),
        ((2, 4), "4", 2, "total_devices: '4' is not a positive integer"),
        ((2, 4), 4.0, 2, "total_devices: 4.0 is not a positive integer"),
        ((2, 4), 8, True, "num_processes: True is not a positive integer"),
        ((2, 4), 2**31, 2, "total_devices: 2147483648 is more than 2147483647"),
        ((1,) * 65, 1, 1, "65 axes; at most 32"),
    ],
)
def test_what_does_not_match_is_a_value_error(
    shape: Any, local: Any, processes: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        share(shape, local, processes)
    assert isinstance(caught.value, mw.errors.MeshwrightError)
