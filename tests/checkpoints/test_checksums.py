"""A checksum is the same on every mesh, and changes with every bit."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
from checkpoint_helpers import DP_TP, FSDP, cut

from meshwright.checkpoints.orbax_io import BLOCK, checksum


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    shape=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=3),
    axes=st.permutations(["dp", "tp", None]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "bool", "complex64"]),
    seed=st.integers(0, 99),
)
def test_a_checksum_does_not_depend_on_the_mesh(shape, axes, dtype, seed):
    values = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
    sizes = {"dp": 2, "tp": 4, None: 1}
    entries = [
        axis if size % sizes[axis] == 0 else None for axis, size in zip(axes, shape, strict=False)
    ]
    assert checksum(jax.device_put(values, cut(DP_TP, *entries))) == checksum(values)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    count=st.integers(1, 40),
    dtype=st.sampled_from(["uint8", "float16", "float32", "float64", "complex64", "complex128"]),
    data=st.data(),
)
def test_one_flipped_bit_always_changes_a_checksum(count, dtype, data):
    values = np.random.default_rng(count).random(count).astype(dtype)
    other = values.copy()
    bit = data.draw(st.integers(0, 8 * values.nbytes - 1))
    other.view(np.uint8)[bit // 8] ^= 1 << bit % 8
    assert checksum(values) != checksum(other)


def test_a_checksum_sees_moved_elements_and_shapes_beyond_a_block():
    values = np.arange(3 * BLOCK, dtype=np.float32)
    swapped = values.copy()
    swapped[[5, 2 * BLOCK]] = swapped[[2 * BLOCK, 5]]
    assert len({checksum(values), checksum(swapped), checksum(values[::-1])}) == 3
    tall = values.reshape(-1, 3)
    placed = jax.device_put(tall, cut(FSDP, "fsdp"))
    assert checksum(tall) == checksum(placed) == checksum(np.asfortranarray(tall))
    wide = values.reshape(1, 3, -1)
    assert checksum(wide) == checksum(jax.device_put(wide, cut(DP_TP, None, None, "tp")))


def test_a_checksum_is_the_same_in_every_version():
    assert checksum(np.arange(6, dtype=np.float32).reshape(2, 3)) == 0x128710263E63F91C
