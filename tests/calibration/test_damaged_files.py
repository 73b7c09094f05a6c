"""Files of speeds that are damaged, hostile or something else: an error that says what, in time."""

import dataclasses
import json
import math
import os

import hypothesis
import pytest
from hypothesis import strategies as st
from test_calibration_file import a_calibration

import meshwright as mw
from meshwright.calibration.comparison import compare_calibrations
from meshwright.cli.main import main
from meshwright.errors import CalibrationError
from meshwright.hardware.calibration_file import _MOST_BYTES, load
from meshwright.rehearsal.kernel_speeds import speeds

GOOD = a_calibration().to_json()


def changed(**changes):
    return json.dumps({**GOOD, **changes})


def figure(number=0, **changes):
    figures = [dict(each) for each in GOOD["figures"]]
    figures[number] |= changes
    return changed(figures=figures)


def link(**changes):
    return changed(links=[{**GOOD["links"][0], **changes}])


def without(name):
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


LONG = "9" * 5000
TEXTS = {
    "empty": ("", "damaged: not JSON"),
    "truncated": (json.dumps(GOOD)[:300], "damaged: not JSON"),
    "cut in the middle of a number": (json.dumps(GOOD)[:-1], "damaged: not JSON"),
    "two files in one": (json.dumps(GOOD) * 2, "damaged: not JSON .Extra data"),
    "a number": ("3", "is not a calibration"),
    "null": ("null", "is not a calibration"),
    "a list": (json.dumps([GOOD]), "is not a calibration"),
    "another format": (changed(format="other"), "is not a calibration"),
    "nested": ("[" * 100_000 + "]" * 100_000, "damaged: not JSON"),
    "byte order mark": ("\ufeff" + json.dumps(GOOD), "damaged: not JSON"),
    "version 99": (changed(version=99), "is of version 99, and this meshwright reads up to 1"),
    "version 0": (changed(version=0), "version is 0, not an integer from 1"),
    "version true": (changed(version=True), "version is True, not an integer"),
    "version as text": (changed(version="1"), "version is '1', not an integer"),
    "no version": (without("version"), "there is no 'version'"),
    "no chip": (without("chip"), "there is no 'chip'"),
    "no figures": (without("figures"), "there is no 'figures'"),
    "no processes": (without("processes"), "there is no 'processes'"),
    "a key twice": ('{"format": 1, "format": 2}', "not JSON .'format' is there twice"),
    "figures an object": (changed(figures={"a": 1}), "figures is {'a': 1}, not a list"),
    "figures of text": (changed(figures=["memory"]), "figures 0 is 'memory', not an object"),
    "processes text": (changed(processes="0000"), "processes is '0000', not a list"),
    "processes below 0": (changed(processes=[-1]), "processes is -1, not an integer from 0"),
    "clocks a list": (changed(clocks=[1980]), "clocks is .1980., not an object"),
    "versions of numbers": (changed(versions={"jax": 1}), "jax is 1, not a text"),
    "a date": (changed(date="yesterday"), "date is 'yesterday', not a date such as"),
    "interrupted": (changed(interrupted="no"), "interrupted is 'no', not true or false"),
    "left out": (changed(left_out=[None]), "left_out is None, not a text"),
    "a long text": (changed(kind="x" * 5000), "kind is 'xx.* not a text of at most"),
    "NaN": (figure(value=math.nan), "not JSON .NaN is not a number"),
    "infinity": (link(latency=math.inf), "not JSON .Infinity is not a number"),
    "value below 0": (figure(value=-3e12), "figure 'product bf16 1024': value is -3.*not a number"),
    "value 0": (figure(value=0), "value is 0, not a number from 1e-15"),
    "value beyond all": (figure(value=1e300), "value is 1e.300, not a number"),
    "value as text": (figure(value="fast"), "value is 'fast', not a number"),
    "value true": (figure(value=True), "value is True, not a number"),
    "value of 5,000 digits": (figure().replace("300000000000000.0", LONG), "damaged"),
    "value of 400 digits": (figure().replace("300000000000000.0", LONG[:400]), "each is 999"),
    "spread below 0": (figure(spread=-0.1), "spread is -0.1, not a number from 0"),
    "each of text": (figure(each=["a"]), "each is 'a', not a number"),
    "another unit": (figure(2, unit="TB/s"), "figure 'memory copy': unit is 'TB/s', not 'B/s'"),
    "no side": (figure(name="product bf16"), "name is 'product bf16', not a dtype and a side"),
    "side 0": (figure(name="product bf16 0"), "not a dtype and a side"),
    "a word for a side": (figure(name="product bf16 big"), "not a dtype and a side"),
    "a figure twice": (figure(1, name="product bf16 1024"), "two figures 'product bf16 1024'"),
    "no bandwidth": (link(bandwidth=0), "'all-gather' over 'inside': bandwidth is 0"),
    "one member": (link(members=1), "members is 1, not an integer from 2"),
    "members beyond all": (link(members=10**30), "members is 1000.*, not an integer from 2"),
    "points flat": (link(points=[1, 2, 3]), "points is 1, not bytes, seconds and their spread"),
    "points short": (link(points=[[1, 2]]), "points is .1, 2., not bytes"),
    "another chip": (
        changed(chip="v5e", topology="v5e:2x4"),
        "was measured on v5e .a chip., not on h200",
    ),
    "a chip that is none": (
        changed(chip="../h200", topology="../h200:8"),
        "was measured on ../h200",
    ),
    "a link twice": (changed(links=GOOD["links"][:1] * 2), "'all-gather' over 'inside': it is the"),
    "each too short": (figure(each=[1e12] * 7), "'product bf16 1024': each has 7 values of 8 dev"),
    "each too long": (figure(each=[1e12] * 9), "each has 9 values of 8 devices"),
    "each of a link": (link(each=[1e-3]), "'all-gather' over 'inside': each has 1 value of 8"),
    "two processes": (changed(processes=[0, 1]), "topology is 'h200:8', and processes has 2 dev"),
    "4,000 processes": (changed(processes=[0] * 4000), "and processes has 4,?000 devices"),
    "another count": (changed(topology="h200:99"), "topology is 'h200:99', and processes has 8"),
    "another machine": (changed(topology="banana:8"), "topology is 'banana:8', not a shape of 'h2"),
    "no shape": (changed(topology="h200"), "topology is 'h200', not a shape of 'h200'"),
    "99 members": (link(members=99), "members is 99, which does not divide the 8 devices"),
    "more slices": (link(slices=9), "slices is 9, more than its 8 members"),
    "another kind": (link(kind="banana"), "'banana' over 'inside': kind is 'banana', not one of"),
    "a latency of years": (link(latency=1e9), "latency is 1000000000.0, not seconds up to 3,600"),
    "a point of years": (link(points=[[1, 1e9, 0]]), "points is 1000000000.0, not seconds up to"),
    "a start of years": (figure(4, value=1e9), "'start iteration': value is 1000000000.0, not sec"),
    "nothing in it": (
        changed(figures=[], links=[]),
        "is empty: it has no figure and no collective",
    ),
    "nothing at all": (changed(figures=[], links=[], processes=[]), "is empty: it has no figure"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path, name):
    text, words = TEXTS[name]
    path = tmp_path / "cluster.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CalibrationError, match=words) as refused:
        mw.topology("h200:8", speeds=path)
    assert refused.value.option == "speeds" and len(str(refused.value)) < 600
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n\x00\x00", "ü".encode("utf-16"), b"\xff" * 99]
)
def test_a_binary_is_no_calibration(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CalibrationError, match=r"damaged: not JSON \('utf-8' codec"):
        mw.place("tp:8", "h200:8", speeds=tmp_path / "x.json")


def test_what_is_no_file_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    for path, words in (
        (tmp_path, "speeds: /.* is a folder, not a file. Name a file of"),
        (tmp_path / "pipe.json", r"speeds: /.*pipe.json is a pipe, not a file\."),
        ("/dev/zero", r"speeds: /dev/zero is a device, not a file\."),
        (tmp_path / "none.json", "there is no file"),
        (tmp_path / "loop.json", "there is no file|symbolic links"),
        ("", "speeds: the path is empty. Name a file"),
        ("~nobody-of-that-name/x.json", "home"),
        ("a\0b.json", "there is no file|null"),
    ):
        with pytest.raises(CalibrationError, match=words) as refused:
            mw.topology("h200:8", speeds=path)
        assert "damaged" not in str(refused.value)
    # The command that compares reads its files by the same door.
    assert main(["calibrate", "--compare", str(tmp_path / "pipe.json")]) == 2
    assert "pipe.json is a pipe, not a file" in capsys.readouterr().err
    good = a_calibration().save(tmp_path / "good.json")
    assert main(["calibrate", "--compare", str(good), "/dev/zero"]) == 2
    assert "--compare: /dev/zero is a device, not a file" in capsys.readouterr().err


def test_a_file_far_too_large_is_not_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(_MOST_BYTES + 1)
    with pytest.raises(
        CalibrationError, match=r"^speeds: /\S*large.json has .* a calibration has at most 64 MiB"
    ):
        load(path)


def test_text_of_a_file_cannot_steer_a_terminal(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(changed(kind="\x1b[2Jh200", left_out=["a\rb\u202e"]), encoding="utf-8")
    shown = str(load(path))
    assert "\x1b" not in shown and "\r" not in shown and "?[2Jh200" in shown


def test_a_file_of_before_sources_and_one_with_more_fields_are_read(tmp_path):
    path = tmp_path / "x.json"
    old = [{k: v for k, v in each.items() if k != "source"} for each in GOOD["figures"]]
    path.write_text(changed(figures=old, remark="of the night shift"))
    assert load(path).to_json() == GOOD


def test_an_interrupted_job_may_lack_devices_of_a_figure(tmp_path):
    path = tmp_path / "x.json"
    data = json.loads(figure(each=[1e12] * 4))
    path.write_text(json.dumps({**data, "interrupted": True}))
    assert len(load(path).figures[0].each) == 4


@pytest.mark.parametrize(
    ("chip", "topology", "devices"),
    [
        ("v5e", "v5e:2x2 x 2 slices", 8),
        ("v4", "v4:2x2x1", 8),
        ("v5p", "v5p:4x4x8_twisted", 128),
        ("gb200", "gb200:4x2", 8),
        ("unknown", "AMD Instinct MI300X:8", 8),
    ],
)
def test_every_name_of_live_devices_is_a_topology(tmp_path, chip, topology, devices):
    figures = a_calibration(devices=devices).figures
    made = a_calibration(figures=figures, links=(), processes=(0,) * devices)
    made = dataclasses.replace(made, chip=chip, topology=topology)
    assert load(made.save(tmp_path / "x.json")).topology == topology


def _mutated(data, draw):
    """One place of plain data replaced by something else."""
    other = st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        *(st.just([]), st.just({}), st.just([[]])),
    )
    if isinstance(data, dict) and data and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(data)))
        return {**data, key: _mutated(data[key], draw)}
    if isinstance(data, list) and data and draw(st.integers(0, 9)):
        place = draw(st.integers(0, len(data) - 1))
        return [*data[:place], _mutated(data[place], draw), *data[place + 1 :]]
    return draw(other)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.data())
def test_any_other_value_anywhere_is_refused_or_can_be_used(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_text(json.dumps(_mutated(GOOD, data.draw), default=str), encoding="utf-8")
    try:
        machine = mw.topology("h200:8", speeds=path)
    except CalibrationError:
        return
    # What is read can be used: to rehearse, to place, to compare, to print.
    speed = speeds(machine.chip)
    assert 0 < speed.compute(2.0 * 777**3, "bf16") < math.inf
    placed = mw.place("dp:2, tp:4", machine)
    assert 0 <= placed.cost < math.inf
    str(placed), str(compare_calibrations(machine.chip.measured)), str(machine.speeds)
