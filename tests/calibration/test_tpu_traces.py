"""What a TPU's trace is read as: made by hand in the profiler's own format, for want of a TPU."""

import jax
import pytest

from meshwright.calibration.probes import parts
from meshwright.calibration.timing import _by_run
from meshwright.calibration.trace import Event, read_trace
from meshwright.hardware.chips import CHIPS


def plane(name, lines):
    """A plane as text: lines of events, each with its name, start and duration in us."""
    names = sorted({event[0] for events in lines.values() for event in events})
    text = f'name: "{name}"\n'
    for number, each in enumerate(names, 1):
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{each}" }} }}\n'
    for line, events in lines.items():
        text += f'lines {{ name: "{line}" timestamp_ns: 1000\n'
        for each, start, duration in events:
            number = names.index(each) + 1
            text += f"events {{ metadata_id: {number} offset_ps: {int(start * 1e6)} "
            text += f"duration_ps: {int(duration * 1e6)} }}\n"
        text += "}\n"
    return f"planes {{ {text} }}\n"


def read(*planes):
    return read_trace(jax.profiler.ProfileData.from_text_proto("".join(planes)))


def test_events_of_a_tpu_are_those_of_the_program_that_runs():
    lines = {
        "XLA Modules": [("jit_one(17)", 0, 10), ("jit_two(18)", 20, 10)],
        "XLA Ops": [("%fusion.3 = bf16[8] fusion(%a)", 1, 4), ("copy.1", 21, 5), ("late", 40, 1)],
        "Steps": [("7", 0, 30)],
    }
    sparse = plane("/device:TPU:0 SparseCore 0", {"XLA Ops": [("fusion.9", 1, 4)]})
    trace = read(plane("/device:TPU:0", lines), plane("/device:TPU:1", lines), sparse)
    assert set(trace.events) == {"jit_one", "jit_two"}
    one = trace.of("jit_one")
    assert [(each.device, each.instruction) for each in one] == [(0, "fusion.3"), (1, "fusion.3")]
    assert one[0].seconds == pytest.approx(4e-6)
    assert [each.instruction for each in trace.of("jit_two")] == ["copy.1", "copy.1"]


def test_an_asynchronous_operation_counts_once():
    # Two warming runs and one more: start, end, and on a line of its own all that lies between.
    events = []
    for run in range(3):
        at = 100e-6 * run
        events += [
            Event(0, "all-gather-start.1", at, 2e-6),
            Event(0, "all-gather-start.1", at, 30e-6),
            Event(0, "all-gather-done.1", at + 2e-6, 28e-6),
        ]
    assert _by_run(events, 3, at_once=True) == {0: [pytest.approx(30e-6)]}
    assert _by_run(events, 3) == {0: [pytest.approx(60e-6)]}
    # An event that was lost: the time that all cover, over the runs.
    assert _by_run(events[:-1], 3, at_once=True) == {0: [pytest.approx(30e-6)]}


def test_a_tpu_is_spared_what_its_model_has_no_use_for():
    for quick in (True, False):
        assert "irregular" not in parts(CHIPS["v5e"], quick)
        assert {"products", "memory", "launches", "functions"} <= parts(CHIPS["v5e"], quick).keys()
    assert "irregular" in parts(CHIPS["h200"], True)
