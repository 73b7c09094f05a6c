"""Which part of a batch a process loads. Meshes over several processes are tested with them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.partitioning.data import _equal_part

MESH = mw.mesh("dp:2, fsdp:2, tp:2")


@pytest.mark.parametrize(
    "spec",
    [None, P(), P("dp"), P(("dp", "fsdp")), P("dp", "tp"), P(None, "dp"), "dp", [["dp", "tp"]]],
    ids=str,
)
def test_one_process_loads_everything(spec):
    assert mw.data_shard(MESH, spec) == mw.DataShard(0, 1)
    assert mw.data_shard(MESH, spec, process=0) == mw.DataShard(0, 1)


def test_a_mesh_without_data_axes_has_one_part():
    assert mw.data_shard(mw.mesh("tp:8")) == mw.DataShard(0, 1)


def test_rows_are_equal_parts_in_order():
    assert [mw.DataShard(index, 4).rows(64) for index in range(4)] == [
        slice(0, 16),
        slice(16, 32),
        slice(32, 48),
        slice(48, 64),
    ]


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 50), st.integers(0, 50))
def test_rows_cover_a_batch_once(count, size):
    parts = [
        np.arange(count * size)[mw.DataShard(i, count).rows(count * size)] for i in range(count)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(count * size))
    assert {len(part) for part in parts} == {size}


def test_a_batch_that_does_not_split_names_the_nearest_that_do():
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"^a batch of 30 does not split into 4 equal parts\. Use 28 or 32",
    ):
        mw.DataShard(1, 4).rows(30)


@pytest.mark.parametrize("batch", ["64", -4, 8.0, None, True])
def test_what_is_no_count_of_rows_is_refused(batch):
    with pytest.raises(mw.errors.PartitionError, match=r"^a batch of .* is not a count of rows\.$"):
        mw.DataShard(1, 4).rows(batch)


@pytest.mark.parametrize(("index", "count"), [(5, 4), (4, 4), (-1, 4), (0, 0), ("0", 4), (0, 2.0)])
def test_parts_that_cannot_be_are_refused(index, count):
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"^DataShard: part .* of .*\. Parts are counted from 0, so the",
    ):
        mw.DataShard(index, count)


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (
            MESH,
            {"process": 3},
            r"^process 3 has no device in this mesh, so it loads nothing\. .* 0",
        ),
        (MESH, {"spec": P("dpp")}, r"^data_shard: .* no mesh axis 'dpp' in .* mean 'dp'\?"),
        (MESH, {"spec": P("dp", "dp")}, r"^data_shard: .* uses axis 'dp' twice"),
        (MESH, {"spec": 3}, r"^data_shard: 3 is not a spec"),
        (MESH.abstract_mesh, {}, r"^data_shard needs a Mesh of devices, which know their proc"),
        ("dp:8", {}, r"^mesh: 'dp:8' is not a jax.sharding.Mesh"),
    ],
)
def test_bad_input_is_refused(mesh, options, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.data_shard(mesh, **options)


@pytest.mark.parametrize(
    ("loaded", "parts"),
    [
        ({0: [0, 1], 1: [2]}, 3),
        ({0: [0], 1: [1, 2, 3]}, 4),
        ({0: [0, 2], 1: [1, 3]}, 4),
        ({0: [0, 1], 1: [1, 2], 2: [2, 3]}, 4),
        ({0: [0, 1], 1: [0, 1, 2, 3]}, 4),
    ],
)
def test_unequal_parts_are_refused_with_one_text_for_all(loaded, parts):
    texts = set()
    for process in loaded:
        with pytest.raises(
            mw.errors.PartitionError,
            match=r"^the batch over dp, fsdp is not cut into equal, contiguous parts per process "
            r"\(process \d holds [\d, ]+ of \d\)\. Put the data axes first",
        ) as caught:
            _equal_part(loaded, parts, process, ["dp", "fsdp"])
        texts.add(str(caught.value))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("loaded", "parts", "indices", "count"),
    [
        ({0: [0, 1], 1: [2, 3]}, 4, [0, 1], 2),
        ({0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}, 4, [0, 0, 1, 1], 2),
        ({0: [0], 1: [0]}, 1, [0, 0], 1),
        ({0: [2, 3], 1: [0, 1]}, 4, [1, 0], 2),
    ],
)
def test_equal_parts_are_numbered_by_what_is_held(loaded, parts, indices, count):
    found = [_equal_part(loaded, parts, process, ["dp"]) for process in sorted(loaded)]
    assert found == [mw.DataShard(index, count) for index in indices]


def batch_by_all(count, source, batch, step):
    """The next batch after `step`, as so many processes load it together."""
    parts = [mw.DataShard(me, count).rows_of(source, batch, step=step) for me in range(count)]
    assert len({len(part) for part in parts}) == 1
    return [row for part in parts for row in part[: batch // count]]


def test_no_row_is_repeated_or_skipped_when_the_number_of_processes_changes():
    order = np.random.default_rng(0).permutation(100)
    counts = [4, 4, 2, 1, 3, 12, 6, 4]  # one per batch: a restart before each
    read = [batch_by_all(count, order, 12, step) for step, count in enumerate(counts)]
    assert [row for rows in read for row in rows] == order[:96].tolist()
    rows = mw.DataShard(1, 3).rows_of(order, 12, step=6)
    assert (len(rows), rows[-1], repr(rows)) == (8, order[91], "<ShardRows 8 rows of 100>")
    assert list(mw.DataShard(1, 3).rows_of(order, 12, step=9)) == []
    with pytest.raises(IndexError, match="row 8 of 8"):
        rows[8]


@pytest.mark.parametrize(
    ("source", "batch", "step", "message"),
    [
        (iter([1]), 8, 0, "has no rows by number"),
        ([1], 7, 0, "does not split into 2 equal parts"),
        ([1], 0, 0, "a batch of 0 has no rows"),
        ([1], 8, -1, "step -1 is not a count of batches"),
    ],
)
def test_rows_of_what_is_no_source_are_refused(source, batch, step, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.DataShard(0, 2).rows_of(source, batch, step=step)


def test_grain_goes_on_where_other_processes_stopped():
    grain = pytest.importorskip("grain")
    shuffled = grain.MapDataset.range(40).shuffle(seed=3).repeat(2)

    def batches(count, step):
        parts = [mw.DataShard(me, count).rows_of(shuffled, 8, step=step) for me in range(count)]
        each = [iter(grain.MapDataset.source(p).batch(8 // count).to_iter_dataset()) for p in parts]
        return [np.concatenate(rows) for rows in zip(*each, strict=True)]

    before, after = batches(4, 0)[:3], batches(2, 3)
    assert np.concatenate(before + after).tolist() == list(shuffled)
