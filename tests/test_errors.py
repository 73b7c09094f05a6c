"""Messages stay short whatever goes into them."""

import pickle

import pytest

import meshwright as mw
from meshwright.errors import LONGEST_MESSAGE, listing, near, short

ERRORS = (
    mw.errors.SpecError,
    mw.errors.TopologyError,
    mw.errors.PlacementError,
    mw.errors.MeshError,
    mw.errors.BackendError,
)


class Loud:
    def __repr__(self) -> str:
        raise KeyError("no")


def test_all_errors_are_value_errors_of_one_family() -> None:
    assert issubclass(mw.errors.MeshwrightError, ValueError)
    assert all(issubclass(error, mw.errors.MeshwrightError) for error in ERRORS)


def test_warnings_are_user_warnings() -> None:
    assert issubclass(mw.errors.IdleDevicesWarning, UserWarning)
    assert issubclass(mw.errors.MeshOrderWarning, UserWarning)


@pytest.mark.parametrize("error", ERRORS)
def test_a_message_is_cut_at_the_limit_and_says_so(error: type[mw.errors.MeshwrightError]) -> None:
    assert LONGEST_MESSAGE == 1500
    assert str(error("x" * 1500)) == "x" * 1500
    cut = str(error("x" * 1501))
    assert len(cut) == 1500
    assert cut.endswith("xxx ...")


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(mw.errors.SpecError("axis 'dp'")))  # noqa: S301
    assert type(error) is mw.errors.SpecError
    assert str(error) == "axis 'dp'"


def test_short_leaves_short_values_alone() -> None:
    assert short("dp") == "'dp'"
    assert short([1, 2]) == "[1, 2]"
    assert short("x" * 58) == repr("x" * 58)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        b"\x00" * 10**6,
        "\U0010ffff" * 100,
        list(range(10**5)),
        {"a": "b" * 500},
        "'" * 61,
    ],
)
def test_short_never_exceeds_its_limit(value: object) -> None:
    for limit in (12, 20, 60):
        assert len(short(value, limit)) <= limit
        assert short(value, limit).endswith(" ...")


def test_short_survives_a_repr_that_raises() -> None:
    assert short(Loud()) == "<Loud whose repr raised KeyError>"
    assert short([Loud()]) == "<list whose repr raised KeyError>"
    assert short(10**5000) == "<int whose repr raised ValueError>"


def test_short_survives_endless_nesting() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert short(value) == "<list whose repr raised RecursionError>"
    while value:
        value = value[0]  # type: ignore[assignment]


def test_near_names_the_closest_word() -> None:
    assert near("explict", ["auto", "explicit", "manual"]) == " Did you mean 'explicit'?"
    assert near("v5pp", iter(["v5p", "v4"])) == " Did you mean 'v5p'?"


def test_near_is_silent_when_nothing_is_close() -> None:
    assert near("banana", ["dp", "tp"]) == ""
    assert near("banana", []) == ""
    assert near("", ["dp"]) == ""


def test_listing_says_how_many_it_left_out() -> None:
    assert listing([]) == ""
    assert listing(["dp"]) == "dp"
    assert listing(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listing(range(9)) == "0, 1, 2, 3, 4, 5, 6, 7 and 1 more"
    assert listing(range(100_000), limit=2) == "0, 1 and 99998 more"


def test_a_misspelt_public_name_is_suggested() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'create_mseh'\. Did you mean 'create_mesh'"
    ):
        mw.create_mseh  # noqa: B018


def test_every_public_name_is_there() -> None:
    assert set(mw.__all__) <= set(dir(mw))
    assert all(getattr(mw, name) is not None for name in mw.__all__)
