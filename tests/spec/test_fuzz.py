"""Whatever comes in, a spec comes out or an error of ours."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from meshwright.errors import LONGEST_MESSAGE, MeshwrightError
from meshwright.spec.mesh_spec import MeshSpec

ROUNDS = 200_000
PIECES = ("dp", "tp", "fsdp", "a", "", ":", "=", ",", "*", " ", "-1", "0", "1", "2", "8", "-2")
PIECES += ("2.0", "9" * 30, "auto", "explicit", "manual", "Auto", "\n", "\x00", "\u200b", "é")
GOOD = ("dp:2, fsdp:-1, tp:4", "dp:2", "a:2*8, b:-1*1", "dp:2:explicit, tp:4", "x=1,y=2,z=3")


class Hostile:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def mutated(rng: random.Random) -> str:
    """A good spec with a few characters changed, moved or repeated."""
    text = list(rng.choice(GOOD))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        change = rng.randrange(3)
        if change == 0:
            text.insert(at, rng.choice(PIECES))
        elif change == 1 and text:
            del text[at : at + rng.randrange(1, 4)]
        else:
            text[at:at] = text[: rng.randrange(6)]
    return "".join(text)


def assembled(rng: random.Random) -> str:
    """Pieces of the grammar in any order."""
    return "".join(rng.choices(PIECES, k=rng.randrange(8)))


def unicode_text(rng: random.Random) -> str:
    return "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(6)))


def raw_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(8))


def scalar(rng: random.Random) -> Any:
    kind = rng.randrange(12)
    if kind < 4:
        return rng.choice((1, 2, 4, 8, -1, 0, -2, 3))
    if kind == 4:
        return rng.getrandbits(rng.choice((8, 40, 20_000))) - 3
    if kind == 5:
        return rng.choice((1.5, float("nan"), float("inf"), 2.0, 1j))
    if kind == 6:
        return rng.choice((None, True, False, ..., Hostile(), object, Hostile))
    if kind == 7:
        return rng.choice((np.int32(2), np.uint8(4), np.float32(2), np.bool_(True), np.array(3)))
    if kind == 8:
        return raw_bytes(rng)
    return rng.choice(("dp", "tp", "fsdp", "", " ", "a b", "2", "x:y", unicode_text(rng)))


def nested(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(10)
    if kind < 3 or depth > 3:
        return scalar(rng)
    items = [nested(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 6:
        return items if kind == 3 else tuple(items)
    if kind == 6:
        return {rng.choice((*PIECES, 3, None, b"dp", ("dp", 2))): v for v in items}
    if kind == 7:
        return {"dp": scalar(rng), "tp": scalar(rng)}
    if kind == 8:
        return [("dp", scalar(rng)), (scalar(rng), 2)]
    return np.array([rng.randrange(-1, 5) for _ in items])


def names_for(rng: random.Random) -> Any:
    choice = rng.randrange(6)
    if choice < 3:
        return None
    if choice == 3:
        return ("dp", "tp")[: rng.randrange(3)]
    return nested(rng)


MAKERS: tuple[Callable[[random.Random], Any], ...] = (
    mutated,
    mutated,
    mutated,
    assembled,
    unicode_text,
    raw_bytes,
    nested,
    nested,
)


def test_nothing_but_our_own_error_comes_out() -> None:
    rng = random.Random(20_240_501)  # noqa: S311
    parsed = refused = longest = 0
    per_maker = dict.fromkeys(MAKERS, 0)
    for make in itertools.islice(itertools.cycle(MAKERS), ROUNDS):
        value, names = make(rng), names_for(rng)
        try:
            spec = MeshSpec.parse(value, names)
        except MeshwrightError as error:
            refused += 1
            longest = max(longest, len(error.args[0]))
        else:
            parsed += 1
            per_maker[make] += 1
            assert MeshSpec.parse(f"{spec}") == spec
    assert parsed + refused == ROUNDS
    assert parsed > 10_000
    assert refused > 100_000
    assert 0 < longest <= LONGEST_MESSAGE
    assert per_maker[mutated] > 5_000
    assert per_maker[nested] > 200


def test_nothing_but_our_own_error_comes_out_of_types_dcn_and_sizes() -> None:
    rng = random.Random(7)  # noqa: S311
    spec = MeshSpec.parse("dp:-1, tp:4")
    done: dict[str, int] = {}
    for _ in range(5_000):
        for what, call in (
            ("types", lambda: spec.with_types(nested(rng))),
            ("dcn", lambda: spec.with_dcn(nested(rng), scalar(rng))),
            ("dcn text", lambda: spec.with_dcn(mutated(rng))),
            ("resolve", lambda: spec.resolve(scalar(rng), scalar(rng))),
        ):
            try:
                call()
            except MeshwrightError as error:
                assert len(error.args[0]) <= LONGEST_MESSAGE
                done[f"{what} refused"] = done.get(f"{what} refused", 0) + 1
            else:
                done[what] = done.get(what, 0) + 1
    assert all(done[what] > 10 for what in ("types", "dcn", "dcn text", "resolve")), done
    assert all(done[f"{what} refused"] > 100 for what in ("types", "dcn", "dcn text", "resolve"))
