"""Batches and trees over real processes: each loads its part, and together they hold the whole."""

from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).with_name("shard_worker.py")
BATCH, ROW = 64, 4
SUM = sum(range(BATCH * ROW))

WORLDS = [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)]
worlds = pytest.mark.parametrize(("processes", "devices"), WORLDS, ids=str)


def reports(processes, devices):
    """What each of `processes` processes with `devices` devices found."""
    return launch(WORKER, processes, devices)


def expected_parts(name, processes):
    """`[index, count]` of every process."""
    pairs = max(1, processes // 2)
    return {
        "own rows": [[me, processes] for me in range(processes)],
        "rows over all": [[me, processes] for me in range(processes)],
        "dp and fsdp": [[me, processes] for me in range(processes)],
        "same rows": [[0, 1]] * processes,
        "tp crosses": [[0, 1]] * processes,
        "rows shared by two": [[me * pairs // processes, pairs] for me in range(processes)],
    }[name]


LAYOUTS = [
    "own rows",
    "rows over all",
    "dp and fsdp",
    "same rows",
    "tp crosses",
    "rows shared by two",
]
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@worlds
@layouts
def test_every_process_is_told_its_part(processes, devices, layout):
    found = reports(processes, devices)
    expected = expected_parts(layout, processes)
    assert [report["batches"][layout]["part"] for report in found] == expected
    # Any process can also tell what the others load.
    assert all(report["batches"][layout]["asked"] == expected for report in found)


@worlds
def test_processes_that_share_rows_have_the_same_index(processes, devices):
    parts = [r["batches"]["rows shared by two"]["part"] for r in reports(processes, devices)]
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert first == second
    assert len({index for index, _ in parts}) == max(1, processes // 2)


@worlds
@layouts
@pytest.mark.parametrize("how", ["by jax", "by us"])
def test_parts_assemble_into_the_global_batch(processes, devices, layout, how):
    for report in reports(processes, devices):
        batch = report["batches"][layout]
        assert batch[how]["right"] is True
        assert batch[how]["sum"] == SUM
        assert batch[how]["shards"] == devices
        assert batch["shape"] == [BATCH, ROW]
        assert batch["second"] == SUM + BATCH * ROW


@worlds
def test_uneven_parts_are_refused_alike_everywhere(processes, devices):
    first, *others = [report["uneven"] for report in reports(processes, devices)]
    assert all(other == first for other in others)
    for text in first:
        assert text.startswith(
            "PartitionError: the batch over dp is not cut into equal, contiguous parts per process "
            "(process "
        )
    turned, lopsided = first
    held = ", ".join(str(part) for part in range(0, processes * devices, processes))
    assert f"(process 0 holds {held} of {processes * devices})" in turned
    assert f" of {processes * devices - 1})" in lopsided


@worlds
@pytest.mark.parametrize("layout", ["own rows", "rows over all"])
@pytest.mark.parametrize("kind", ["host", "device", "callback", "bf16", "int4", "narrowed"])
def test_a_process_holds_only_its_own_pieces(processes, devices, layout, kind):
    width = {"bf16": 2, "int4": 1}.get(kind, 4)
    total = 0
    for report in reports(processes, devices):
        found = report["placed"][layout][kind]
        assert found["right"] is True
        assert found["shards"] == devices
        assert found["bytes"] == BATCH * ROW * width // processes
        total += found["bytes"]
        if kind not in ("bf16", "int4"):
            assert found["sum"] == SUM
            assert found["dtype"] == "float32"
    assert total == BATCH * ROW * width


@worlds
@pytest.mark.parametrize("layout", ["own rows", "rows over all"])
def test_a_callback_is_asked_for_own_pieces_alone(processes, devices, layout):
    for report in reports(processes, devices):
        assert report["placed"][layout]["asked for own pieces"] is True


@worlds
def test_scalars_and_keys_are_placed_too(processes, devices):
    for report in reports(processes, devices):
        found = report["placed"]["own rows"]
        assert found["scalar"]["right"] is True and found["scalar"]["sum"] == 3
        assert found["scalar"]["shards"] == devices
        assert found["keys"] is True


@worlds
def test_an_error_is_the_same_text_in_every_process(processes, devices):
    first, *others = [report["wrong"] for report in reports(processes, devices)]
    assert all(other == first for other in others)
    fit, wide, tree, local, rules, made = first
    assert all(text.startswith("PartitionError: ") for text in first)
    assert "dim 1: no mesh axis 'nope' in dp, tp" in fit
    assert "c: float64 would become float32" in wide
    assert "First difference: 'b/0' has no spec" in tree
    assert "a: dim 0: no mesh axis 'nope' in dp, tp" in local
    assert "b/0: (64, 4) matches no rule" in rules
    assert "(the array): dim 0 has size 7, not divisible by 8 (axes dp, tp)" in made


@worlds
def test_initialisers_and_states_are_made_in_pieces(processes, devices):
    for report in reports(processes, devices):
        found = report["initialised"]
        assert found["w"]["right"] is found["mu"]["right"] is found["beside"] is True
        assert found["w"]["bytes"] == BATCH * 32 * 4 // processes
        assert found["n"]["right"] is True and found["n"]["shards"] == devices


@worlds
def test_a_process_outside_the_mesh_holds_nothing_and_loads_nothing(processes, devices):
    first, *others = [report["elsewhere"] for report in reports(processes, devices)]
    assert (first["shards"], first["load"]) == (devices, "some")
    for place, other in enumerate(others, 1):
        assert (other["shape"], other["dtype"]) == ([BATCH, ROW], "float32")
        assert other["shards"] == 0
        assert other["load"] == (
            f"PartitionError: process {place} has no device in this mesh, so it loads nothing. "
            "Processes of the mesh: 0."
        )
