"""Groups in every notation, and the mesh axes they run over."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.rehearsal.collectives.analyze import axes_crossed, axes_of, read_groups, read_pairs

checked = settings(derandomize=True, deadline=None, max_examples=200)
NAMES = ("dp", "fsdp", "tp", "ep")


def as_lists(groups):
    return [group.tolist() for group in groups]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0,1,2},{3}}", [[0, 1, 2], [3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'b','a'}", [[0, 2, 1, 3]]),
        ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
        (
            "mesh['a'=1,'b'=1,'c'=4,'d'=2], device_ids=([2,4]T(1,0)) {'c'}",
            [[0, 1, 2, 3], [4, 5, 6, 7]],
        ),
    ],
)
def test_every_notation_is_read(text, groups):
    assert as_lists(read_groups(text, 4)) == groups


@pytest.mark.parametrize("text", ["V3[1,2]", "mesh[]", "[a,b]"])
def test_an_unknown_notation_is_refused(text):
    with pytest.raises(MeshwrightError, match="unknown form"):
        read_groups(text, 2)


def test_pairs_are_read():
    assert read_pairs("{{0,1},{1,0}}").tolist() == [[0, 1], [1, 0]]
    assert read_pairs("{}").shape == (0, 2)


@st.composite
def groups_over_axes(draw):
    """A mesh, some of its axes (one of them perhaps in part), and the groups over them."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=4))
    chosen = draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
    cut = draw(st.sampled_from(sorted(chosen)))
    block = draw(st.sampled_from([d for d in range(2, sizes[cut] + 1) if sizes[cut] % d == 0]))
    outer = draw(st.booleans())
    split, mine = [], []
    for dim, size in enumerate(sizes):
        if dim != cut:
            mine += [len(split)] if dim in chosen else []
            split.append(size)
        else:
            mine.append(len(split) + (0 if outer else 1))
            split += [block, size // block] if outer else [size // block, block]
    order = [d for d in range(len(split)) if d not in mine] + mine
    members = math.prod(split[d] for d in mine)
    groups = np.arange(math.prod(sizes)).reshape(split).transpose(order).reshape(-1, members)
    counts = {d: block if d == cut else sizes[d] for d in chosen}
    return sizes, split, order, members, groups, counts


@checked
@given(groups_over_axes())
def test_axes_come_back_from_their_groups(drawn):
    sizes, split, order, members, groups, counts = drawn
    counted = f"[{len(groups)},{members}]<={split}T({','.join(map(str, order))})".replace(" ", "")
    listed = "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"
    devices = math.prod(sizes)
    assert as_lists(read_groups(counted, devices)) == groups.tolist()
    assert as_lists(read_groups(listed, devices)) == groups.tolist()
    found = axes_of(read_groups(counted, devices), NAMES[: len(sizes)], sizes)
    assert {NAMES.index(part.name): part.members for part in found} == counts
    assert all(part.whole == (part.members == sizes[NAMES.index(part.name)]) for part in found)


@checked
@given(groups_over_axes(), st.randoms(use_true_random=False))
def test_order_of_groups_and_members_does_not_matter(drawn, random):
    sizes, *_, groups, counts = drawn
    shuffled = [np.array(random.sample(group.tolist(), len(group))) for group in groups]
    random.shuffle(shuffled)
    found = axes_of(shuffled, NAMES[: len(sizes)], sizes)
    assert {NAMES.index(part.name): part.members for part in found} == counts


@pytest.mark.parametrize(
    "groups",
    [[[0, 3], [1, 2]], [[0, 1, 2], [3]], [[0, 1], [2, 3], [4, 6], [5, 7]], [[0, 1, 2]]],
)
def test_groups_that_follow_no_axes_are_irregular(groups):
    assert axes_of([np.array(group) for group in groups], ("a", "b", "c"), (2, 2, 2)) is None


def test_a_permutation_runs_over_the_axes_it_crosses():
    ring = np.array([[0, 1], [1, 0], [2, 3], [3, 2]])
    assert [str(part) for part in axes_crossed(ring, ("dp", "tp"), (2, 2))] == ["tp"]
    turn = np.array([[0, 0], [1, 2], [2, 1], [3, 3]])
    assert [str(part) for part in axes_crossed(turn, ("dp", "tp"), (2, 2))] == ["dp", "tp"]
    assert axes_crossed(np.array([[0, 0]]), ("dp", "tp"), (2, 2)) == ()
