"""Real processes over loopback: every one builds the same mesh, and work on it comes out right."""

import math
from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).with_name("worker.py")

worlds = pytest.mark.parametrize(
    ("processes", "devices"),
    [(2, 1), (2, 4), *(pytest.param(4, n, marks=pytest.mark.slow) for n in (1, 2))],
    ids=str,
)


def reports(processes, devices):
    """What each of `processes` processes with `devices` devices found."""
    return launch(WORKER, processes, devices)


def rows(grid, columns):
    return [grid[at : at + columns] for at in range(0, len(grid), columns)]


@worlds
def test_every_process_sees_the_same_meshes(processes, devices):
    first, *others = reports(processes, devices)
    own = {"local", "cpu mesh"}
    shared = {key: value for key, value in first.items() if key not in own}
    for other in others:
        assert {key: value for key, value in other.items() if key not in own} == shared


@worlds
@pytest.mark.parametrize(
    "built",
    [
        "mesh",
        "mesh, tp first",
        "create_mesh",
        "create_mesh, jax",
        "create_mesh, defaults",
        "dcn",
        "dcn both",
        "after",
    ],
)
def test_a_mesh_holds_every_device_and_sums_right_in_every_process(processes, devices, built):
    for report in reports(processes, devices):
        mesh = report[built]
        assert math.prod(mesh["shape"].values()) == processes * devices
        assert len(set(mesh["ids"])) == len(mesh["ids"]) == processes * devices
        elements = math.prod(2 * size for size in mesh["shape"].values())
        assert mesh["sum"] == elements * (elements - 1) / 2


@worlds
def test_processes_are_hosts_on_the_slow_network(processes, devices):
    assert reports(processes, devices)[0]["topology"] == [
        f"cpu:{devices}x{processes}",
        processes,
        processes,
    ]


@worlds
@pytest.mark.parametrize("built", ["mesh", "create_mesh", "create_mesh, jax"])
def test_dp_crosses_processes_and_tp_stays_inside_one(processes, devices, built):
    mesh = reports(processes, devices)[0][built]
    assert mesh["shape"] == {"dp": processes, "tp": devices}
    groups = rows(mesh["processes"], devices)
    assert [set(group) for group in groups] == [{process} for process in range(processes)]


@worlds
def test_tp_stays_inside_a_process_wherever_it_stands(processes, devices):
    mesh = reports(processes, devices)[0]["mesh, tp first"]
    assert mesh["shape"] == {"tp": devices, "dp": processes}
    groups = rows(mesh["processes"], processes)
    assert [sorted(group) for group in groups] == [list(range(processes))] * devices


@worlds
def test_the_default_mesh_is_fsdp_over_everything_and_cached(processes, devices):
    report = reports(processes, devices)[0]
    assert report["create_mesh, defaults"]["shape"] == {
        "dp": 1,
        "fsdp": processes * devices,
        "ep": 1,
        "tp": 1,
        "sp": 1,
    }
    assert report["same object"] is True


@worlds
def test_explicit_dcn_gives_exactly_the_shape_asked_for(processes, devices):
    mesh = reports(processes, devices)[0]["dcn"]
    assert mesh["shape"] == {"dp": devices, "tp": processes}
    # The usual order turned round: here `tp` is the one told to cross, `dp` stays inside.
    for group in rows(mesh["processes"], processes):
        assert sorted(group) == list(range(processes))
    both = reports(processes, devices)[0]["dcn both"]
    assert both["shape"] == {"dp": processes * devices, "tp": 1}
    assert both["processes"] == sorted(both["processes"])


@worlds
def test_a_wrong_dcn_is_refused_in_every_process(processes, devices):
    for report in reports(processes, devices):
        unfilled, too_many, too_long = report["wrong dcn"]
        assert unfilled.startswith("PlacementError: ")
        assert f"DCN joins {processes} parts" in unfilled
        assert too_many.startswith("SpecError: ")
        assert too_long.startswith("SpecError: dcn has 3 entries for 2 axes")
        assert "Not enough devices" in report["too many"]


@worlds
def test_a_host_share_needs_no_arguments(processes, devices):
    assert reports(processes, devices)[0]["host share"] == [1, devices]


@worlds
def test_fewer_devices_than_there_are_come_from_one_process(processes, devices):
    report = reports(processes, devices)[0]
    assert report["few"]["ids"] == report["local"]
    (warning,) = report["few"]["warnings"]
    idle = (processes - 1) * devices
    assert f"uses {devices} of {processes * devices} devices; {idle} stay idle" in warning
    assert f"{processes - 1} whole host" in warning


@worlds
def test_a_slow_part_takes_fewer_devices_from_every_process(processes, devices):
    report = reports(processes, devices)[0]
    assert report["one each"]["processes"] == list(range(processes))
    assert len(report["one each"]["warnings"]) == (1 if devices > 1 else 0)


@worlds
def test_the_cpu_mesh_is_this_process_alone(processes, devices):
    local = [report["local"] for report in reports(processes, devices)]
    assert [report["cpu mesh"] for report in reports(processes, devices)] == local
    assert len({device for ids in local for device in ids}) == processes * devices


@worlds
def test_a_mesh_over_processes_is_explained(processes, devices):
    assert reports(processes, devices)[0]["explained"] == [processes, 1]
