"""An ordinary loop of several processes: when one hangs or is told to stop, all say who and why."""

import pytest
from launching import in_time
from spmd_faults import HANG, NO_HANG, Case, run, survivors

SAVED, OTHERS, MACHINE, USER, TERMINATED = 75, 81, 82, 83, 143
IN_STEP = " in train_step since "


def ended_as(case, right):
    """How each process ended; on a busy machine a process may be late once, but not each time."""
    ended = in_time(lambda: run(case), lambda ended: all(map(right, survivors(case, ended))))
    for each in survivors(case, ended):
        assert right(each), "\n".join(f"exit {end.code}\n{end.output[-3000:]}" for end in ended)
    return ended


def test_who_hangs_inside_the_step_is_named_and_its_stack_shown_by_all():
    case = Case("lock", count=2, victim=1)
    line = "meshwright: process 1 hangs, no progress for 3 s, in train_step since "

    def right(end):
        return end.line.startswith(line) and end.line.endswith("process 0 in train_step. All end.")

    ended = ended_as(case, right)
    for end in ended:
        assert "Process 1 stands here on " in end.output
        assert " in happen\n" in end.output
        assert f"(step {case.at});" in end.line
    assert [end.code for end in ended] == [OTHERS, MACHINE]


@pytest.mark.parametrize("kind", ["killed, then told", "killed, then told to save"])
def test_a_dead_process_is_at_fault_though_the_engine_stops_all(kind):
    case = Case(kind, count=2, victim=1)
    died = "meshwright: process 1 died, last seen "
    ended = ended_as(case, lambda end: end.line.startswith(died) and end.code == OTHERS)
    assert ended[1].code == -9


def test_all_save_before_the_same_step_and_leave():
    ended = ended_as(Case("saved", count=2, victim=1), lambda end: end.code == SAVED)
    (step,) = {end.output.partition("saved ")[2].split()[0] for end in ended}
    for end in ended:
        assert f"have saved before step {step}. Run the job again." in end.line


def test_another_shape_in_one_process_is_told_before_it_runs():
    case = Case("shape", count=2, victim=1, timeout=60)
    came = "process 1 came with train_step(float32[4,4]), checksum "
    ended = ended_as(case, lambda end: came in end.line)
    assert "and process 0 with train_step(float32[2,4]), checksum " in ended[0].line
    assert [end.code for end in ended] == [OTHERS, USER]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NO_HANG + HANG)
def test_the_right_process_is_named_whatever_happens_to_it(kind):
    case = Case(kind, count=3, victim=2)
    ended_as(case, lambda end: end.line.startswith("meshwright: process 2 "))


@pytest.mark.slow
@pytest.mark.parametrize("told", ["step", "nothing"])
@pytest.mark.parametrize("kind", ["sleep before", "gil", "callback"])
def test_without_a_wrapped_step_it_goes_by_step_numbers_or_stacks(kind, told):
    case = Case(kind, count=2, victim=1, told=told)
    ended_as(case, lambda end: end.line.startswith("meshwright: process 1 hangs, "))


@pytest.mark.slow
def test_a_process_alone_is_watched_for_hangs_and_a_preemption_is_told_as_such():
    (end,) = run(Case("sleep inside", count=1, victim=0))
    assert end.line.startswith("meshwright: process 0 hangs, no progress for 3 s, in train_step")
    assert (end.code, " in happen\n" in end.output) == (MACHINE, True)
    for end in run(Case("all told", count=2, victim=1)):
        assert "told to stop (SIGTERM)" in end.line
        assert end.code in (TERMINATED, OTHERS)
