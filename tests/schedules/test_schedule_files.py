"""Schedules in files: what is written is read back, and what is wrong is named."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.schedules.files import NOTATIONS, write_text
from meshwright.schedules.named import NAMED

GOOD = "0F0,0F1,0BW0,0BW1\n1F0,1BW0,1F1,1BW1\n"


def _read(folder, text, name="mine.csv", **options):
    (folder / name).write_text(text)
    return mw.schedules.read_schedule(folder / name, **options)


@st.composite
def named(draw):
    name = draw(st.sampled_from(sorted(NAMED)))
    groups = draw(st.integers(1, 6))
    least = max(1, NAMED[name].least_per_group * groups)
    stages = None
    if NAMED[name].chunks is None:
        stages = groups * draw(st.integers(1, 3))
    microbatches = draw(st.integers(least, least + 9))
    return mw.schedules.schedule(name, groups=groups, microbatches=microbatches, stages=stages)


@settings(deadline=None, max_examples=60)
@given(named(), st.sampled_from([("csv", n) for n in NOTATIONS] + [("json", "meshwright")]))
def test_what_is_written_is_read_back_exactly(tmp_path_factory, schedule, how):
    suffix, notation = how
    file = tmp_path_factory.mktemp("files") / f"{schedule.name}.{suffix}"
    mw.schedules.write_schedule(schedule, file, notation=notation)
    again = mw.schedules.read_schedule(file, notation=notation)
    assert again == schedule
    assert again.overlapped == schedule.overlapped


def test_to_json_is_what_the_file_holds(tmp_path):
    schedule = mw.schedules.schedule("dualpipe-v", groups=2, microbatches=4)
    mw.schedules.write_schedule(schedule, tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found == schedule.to_json()
    first = found["overlapped"][1][0]
    assert found["tasks"][1][first : first + 2] == ["1F2", "2BW0"]


def test_csv_has_a_line_per_group_and_a_cell_per_pair(tmp_path):
    mw.schedules.write_schedule(
        mw.schedules.schedule("dualpipe-v", groups=1, microbatches=2), tmp_path / "a.csv"
    )
    assert (tmp_path / "a.csv").read_text() == "0F0,1F0,0F1+1BW0,1F1+0BW0,1BW1,0B1,0W1\n"


def test_torch_letters_are_their_own(tmp_path):
    schedule = mw.schedules.schedule("dualpipe-v", groups=1, microbatches=2)
    mw.schedules.write_schedule(schedule, tmp_path / "a.csv", notation="torch")
    assert (tmp_path / "a.csv").read_text() == (
        "0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\n"
    )


def test_a_file_of_torch_is_never_taken_for_ours(tmp_path):
    theirs = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
    with pytest.raises(mw.errors.ScheduleError, match=r"mine\.csv: mine: group 0: 0W0 is missing"):
        _read(tmp_path, theirs)
    assert _read(tmp_path, theirs, notation="torch").counts == {"F": 4, "BW": 4}


def test_empty_cells_spaces_and_empty_last_lines_mean_nothing(tmp_path):
    spread = ",0F0, 0F1 ,,0BW0,0BW1,,\r\n1F0,1BW0,,1F1,1BW1\r\n\r\n"
    assert _read(tmp_path, spread) == _read(tmp_path, GOOD)
    assert _read(tmp_path, "\ufeff" + GOOD) == _read(tmp_path, GOOD)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", r"mine\.csv, line 1, cell 2: '0X0' is no task.*e\.g\. 2F5; kinds are F, B"),
        ("0F0\n1F0,F1\n", r"mine\.csv, line 2, cell 2: 'F1' is no task"),
        ("0F0,0F\n", r"cell 2: '0F' is no task"),
        ("0F0,0f1\n", r"cell 2: '0f1' is no task"),
        ("0F0,0F-1\n", r"cell 2: '0F-1' is no task"),
        ("0F0,0F9999999999\n", r"cell 2: '0F9999999999' is no task"),
        ("0F0,0I0,0W0\n", r"cell 2: '0I0' is no task.*notation='torch'"),
        ("0F0,(0F1;0B0)OVERLAP_F_B\n", r"is no task.*notation='torch'"),
        ("0F0+0F1+0F2\n", r"cell 1: '0F0\+0F1\+0F2' has 3 tasks; at most two overlap"),
        ("0F0,0SEND_F0\n", r"'0SEND_F0' is a transfer of PyTorch's.*compute_only"),
        ("", r"mine\.csv: no tasks"),
        (",,\n", r"mine\.csv: no tasks"),
        ("0F0,0BW0\n,,\n1F0,1BW0\n", r"mine\.csv, line 2: no tasks\. Every line is a group"),
        ("0F0,0BW0\n2F0,2BW0\n", r"mine\.csv: no task of stage 1, though stage 2 is there"),
        ("0F0,1F0,0BW0\n1BW0\n", r"line 2: 1BW0 in group 1, but stage 1 is in group 0 \(line 1\)"),
        ("0F0,0F1,0BW0\n1F0,1BW0,1F1,1BW1\n", r"mine\.csv: mine: group 0: 0BW1 is missing"),
        ("0F0,0F1,0BW0,0BW1\n1F0,1BW0,1BW1\n", r"mine\.csv: mine: group 1: 1F1 is missing"),
        ("0F0,0BW0,0F0\n", r"group 0, position 2: 0F0 was already run at group 0, position 0"),
        ("0F0,0B0,0BW0\n", r"0B0 is already part of 0BW0"),
        ("0BW0,0F0\n", r"mine\.csv: mine: group 0 waits at 0BW0"),
        ("0F0,0F999999999\n", r"mine\.csv: mine: group 0: 0F1 is missing"),
        ("0F0,999999999F0\n", r"no task of stage 1, though stage 999999999 is there"),
    ],
)
def test_a_broken_csv_names_file_group_and_task(tmp_path, text, message):
    with pytest.raises(mw.errors.ScheduleError, match=message):
        _read(tmp_path, text)


def _json(**changes):
    whole = {"name": "mine", "microbatches": 1, "group_of": [0], "tasks": [["0F0", "0BW0"]]}
    return json.dumps({k: v for k, v in {**whole, **changes}.items() if v != "drop"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"mine\.json: not JSON"),
        ("[" * 100_000, r"mine\.json: not JSON"),
        ("[]", r"mine\.json: a schedule is an object with name, microbatches"),
        (_json(name="drop"), r"mine\.json: 'name' is missing"),
        (_json(task=[]), r"mine\.json: 'task' is not one of.*Did you mean 'tasks'\?"),
        (_json(tasks=["0F0"]), r"mine\.json: 'tasks' is a list of lists"),
        (_json(group_of=0), r"mine\.json: 'group_of' is a list\."),
        (_json(tasks=[["0F0", 5]]), r"mine\.json, group 0, position 1: 5 is no task"),
        (_json(tasks=[["0F0", "0B"]]), r"mine\.json, group 0, position 1: '0B' is no task"),
        (_json(tasks=[["0F0+0BW0"]]), r"group 0, position 0: '0F0\+0BW0' is no task"),
        (_json(overlapped=[["x"]]), r"mine\.json: 'overlapped' holds positions"),
        (_json(overlapped=[[7]]), r"mine\.json: mine: group 0: position 7 cannot be overlapped"),
        (_json(microbatches="x"), r"mine\.json: mine: microbatches: .*is not a positive integer"),
        (_json(group_of=[3]), r"mine\.json: mine: stage 0 is in group 3"),
        (_json(tasks=[["0F0"]], microbatches=2), r"mine\.json: mine: group 0: 0F1 is missing"),
    ],
)
def test_a_broken_json_names_file_and_place(tmp_path, text, message):
    with pytest.raises(mw.errors.ScheduleError, match=message):
        _read(tmp_path, text, "mine.json")


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(mw.errors.ScheduleError, match=r"a\.csv: not text in UTF-8"):
        mw.schedules.read_schedule(tmp_path / "a.csv")


def test_other_endings_and_notations_are_refused(tmp_path):
    schedule = mw.schedules.schedule("gpipe", groups=1, microbatches=1)
    with pytest.raises(
        mw.errors.ScheduleError, match=r"a\.txt: a schedule's file ends in \.csv or"
    ):
        mw.schedules.write_schedule(schedule, tmp_path / "a.txt")
    with pytest.raises(mw.errors.ScheduleError, match="PyTorch's notation is one of CSV files"):
        mw.schedules.write_schedule(schedule, tmp_path / "a.json", notation="torch")
    with pytest.raises(
        mw.errors.ScheduleError, match=r"'touch' is not one of.*Did you mean 'torch'\?"
    ):
        mw.schedules.read_schedule(tmp_path / "a.csv", notation="touch")
    with pytest.raises(mw.errors.ScheduleError, match="takes a Schedule, not a str"):
        mw.schedules.write_schedule("gpipe", tmp_path / "a.csv")
    with pytest.raises(FileNotFoundError):
        mw.schedules.read_schedule(tmp_path / "nowhere.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_schedule_is_not_written(tmp_path):
    broken = mw.schedules.Schedule("bad", 1, (0,), [[("F", 0, 0), ("B", 0, 0)]])
    with pytest.raises(mw.errors.ScheduleError, match="bad: group 0: 0W0 is missing"):
        mw.schedules.write_schedule(broken, tmp_path / "bad.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "a.csv"
    file.write_text(GOOD)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*a\.csv"):
        mw.schedules.write_schedule(mw.schedules.schedule("zb-v", groups=2, microbatches=4), file)
    assert file.read_text() == GOOD
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_links_and_devices_are_written_not_replaced(tmp_path):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    write_text(tmp_path / "link.csv", "new")
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() == "new"
    write_text("/dev/null", "gone")
    assert os.stat("/dev/null").st_rdev  # noqa: PTH116


@pytest.mark.parametrize("path", [3, None, ["a.csv"]])
def test_what_is_no_path_is_named(path):
    with pytest.raises(mw.errors.ScheduleError, match="is not the path of a file") as caught:
        mw.schedules.read_schedule(path)
    assert caught.value.option == "path"
    with pytest.raises(mw.errors.ScheduleError, match="is not the path of a file"):
        mw.schedules.write_schedule(mw.schedules.schedule("1f1b", groups=2, microbatches=2), path)
