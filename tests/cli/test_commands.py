"""The command line, as a person and a script meet it. The pages' examples are goldens too."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import on_a_terminal

from meshwright.cli.dispatch import all_commands
from meshwright.cli.main import main
from meshwright.cli.options import help_text, read_words

HERE = Path(__file__).parent


def _run(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_devices_golden():
    done = _run("devices", "--on", "gb200:72x4")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        (HERE / "devices.golden").read_text(),
        "",
    )


def test_mesh_golden():
    done = _run("mesh", "dp:2, fsdp:-1, tp:4", "--on", "v5e:4x4", "--slices", "2")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        (HERE / "mesh.golden").read_text(),
        "",
    )


def test_devices_without_a_name_are_the_live_ones():
    done = _run("devices")
    assert done.returncode == 0
    assert done.stdout.startswith("cpu:1: 1 device on 1 host")


def test_devices_as_json():
    found = json.loads(_run("devices", "--on", "v5p:4x4x4", "--json").stdout)
    assert (found["devices"], found["hosts"], found["axes"][0]["wraps"]) == (64, 16, True)


def test_mesh_as_json():
    found = json.loads(_run("mesh", "fsdp:-1, tp:8", "--on", "v5p:4x4x4", "--json").stdout)
    assert found["spec"] == "fsdp:8, tp:8"
    assert [axis["size"] for axis in found["axes"]] == [8, 8]
    assert found["cost_s"] < found["runner_up_cost_s"]


def test_html_is_one_page_that_fetches_nothing(tmp_path):
    page = tmp_path / "mesh.html"
    done = _run("mesh", "fsdp:-1, tp:4", "--on", "v5e:4x4", "--html", str(page))
    assert (done.returncode, done.stderr[:25]) == (0, f"wrote {page}"[:25])
    assert done.stderr.endswith(" KiB)\n")
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.count('role="img"') == 4  # two axes, as placed and by a plain reshape
    assert "src=" not in text and "<script" not in text and "<link" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mesh", "fsdp:-1, tp:3", "--on", "v5e:4x4"], "does not divide 16 devices"),
        (["mesh", "", "--on", "v5e:4x4"], "the spec is empty"),
        (["mesh", "dp:2", "--on", "v5q:4x4"], "Did you mean 'v5p'?"),
        (["mesh", "dp:99", "--on", "cpu:8"], "Not enough devices"),
        (["mesh", "dp:-1", "--on", "v5e:3x3"], "v5e does not come in 3x3"),
        (["mesh", "dp:-1", "--on", "v5e:4x4", "--slices", "0"], "--slices: 0 is not a positive"),
        (["mesh", "dp:-1", "--slices", "2"], "--slices goes with a hardware name"),
        (["mesh", "dp:-1, tp:4", "--on", "v5e:4x4", "--dcn", "dp:2"], "there is 1"),
        (["mesh", "dp:-1", "--on", "cpu:8", "--html", "no/such/folder/x.html"], "No such file"),
        (["devices", "--on", "h100"], "is not a chip and a shape"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(words, message):
    done = _run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("meshwright: ")
    assert "Traceback" not in done.stderr


MESH, ON = ["--mesh", "fsdp:8"], ["--on", "cpu:8"]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["banana"], ["there is no 'banana'. Commands: mesh, rehearse, plan, measure, "]),
        (["mehs"], ["there is no 'mehs'. Did you mean 'mesh'? Commands: "]),
        (["--json", "mesh"], ["there is no option --json before a command."]),
        (
            ["mesh"],
            ['SPEC is missing: the mesh, e.g. "dp:2, fsdp:-1, tp:4". See meshwright mesh -'],
        ),
        (
            ["mesh", "dp:2", "--banana"],
            ["mesh has no option --banana. See meshwright mesh --help."],
        ),
        (["mesh", "dp:2", "more"], ["mesh takes no 'more': it is one word more."]),
        (["mesh", "dp:2", "--on"], ["--on has no value: hardware by name, e.g. "]),
        (["mesh", "dp:2", "--json=yes"], ["--json takes no value."]),
        (
            ["schedule", "gpipe", "--groups", "x", "--microbatches", "4"],
            ["--groups: 'x' is not an "],
        ),
        (
            ["rehearse", "tiny", *MESH, "--batch", "8", "--compiler", "cup"],
            ["--compiler: 'cup' is not one of vendor, cpu. Whose compiler: vendor, "],
        ),
        # The misspelt option is told first, and what it stands for is not missing.
        (
            ["rehearse", "tiny", "--mehs", "fsdp:8"],
            [
                "rehearse has no option --mehs. Did you mean --mesh?",
                "--batch is missing: rows of the global batch, over all devices, e.g. 256.",
                "See meshwright rehearse --help.",
            ],
        ),
        (
            ["rehearse"],
            ["MODEL is missing: ", "--mesh is missing: ", "See meshwright rehearse --help."],
        ),
        (
            ["schedule", "zb-h1"],
            ["--groups is missing: ", "--microbatches is missing: ", "See meshwright schedule"],
        ),
        (
            ["rehearse", "lama3-8b", *MESH, "--batch", "8"],
            ["no model 'lama3-8b'. Did you mean 'll"],
        ),
        (["hardware", "v5q"], ["no chip 'v5q'. Did you mean 'v5"]),
        (["completion", "tcsh"], ["SHELL: 'tcsh' is not one of bash, zsh, fish."]),
        (
            ["rehearse", "tiny", "--batch", "8", *MESH, "--compiler", "tpu"],
            ["--compiler: 'tpu' is not one of vendor, cpu. Whose compiler: vendor, the hardware's"],
        ),
        (
            ["mesh", "dp:4", "--on", "v5e:2x2", "--html", "a/out.txt"],
            ["--html: 'a/out.txt' does not end in .html. Write --html a/out.html."],
        ),
    ],
)
def test_mistakes_are_told_together_and_with_what_was_meant(capsys, words, lines):
    assert main(words) == 2
    out, err = capsys.readouterr()
    told = err.removeprefix("meshwright: ").splitlines()
    assert out == "" and len(told) == len(lines)
    for line, start in zip(told, lines, strict=True):
        assert line.strip().startswith(start)


def test_without_words_there_is_help_and_exit_code_2(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: meshwright COMMAND")


# What must answer at once: everything but live devices, trees of yours, and rehearsals.
QUICK = [
    *(["--help"], ["--version"], ["rehearse", "--help"], ["completion", "zsh"], ["cache"]),
    *(["hardware"], ["hardware", "v5p"], ["hardware", "v5e:4x4", "--json"]),
    *(
        ["mesh", "fsdp:-1, tp:4", "--on", "v5e:4x4"],
        ["mesh", "dp:3", "--on", "v5e:4x4", "--slices"],
    ),
    *(["schedule", "zb-h1", "--groups", "2", "--microbatches", "4"], ["schedule", "zbh1"]),
    *(["rehearse", "tiny", "--on", "v5q:4x4", "--batch", "8", *MESH], ["models", "lama"]),
    ["rehearse", "tiny", "--batch", "8", "--mesh", "fsdp:0"],
]


def test_help_schedules_meshes_and_mistakes_need_no_jax():
    code = (
        "import os, sys\n"
        "from meshwright.cli.main import main\n"
        f"codes = [main(words) for words in {QUICK!r}]\n"
        "heavy = [name for name in ('jax', 'rich', 'scipy', 'tyro') if name in sys.modules]\n"
        "sys.exit(f'{codes} {heavy} {os.environ.get(\"JAX_PLATFORMS\")}')"
    )
    unset = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=unset
    )
    codes = [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 2, 2, 2, 2]
    # Where hardware is named, JAX is not to look for any.
    assert done.stderr.splitlines()[-1] == f"{codes} [] cpu"


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
from meshwright.cli import main, schedule

class Lost:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def interrupted(*_, **__):
    {how}
    return {{}}

schedule.simulate = interrupted
sys.argv = ["meshwright", "schedule", "gpipe", "--groups", "2", "--microbatches", "4"]
main.main()
"""


@pytest.mark.parametrize(
    "how",
    [
        "os.kill(os.getpid(), signal.SIGINT)",
        "Lost()",  # Python drops what a destructor raises
        "try: os.kill(os.getpid(), signal.SIGINT)\n    except BaseException: 1 / 0",
    ],
)
def test_an_interrupt_leaves_one_line_and_130(how):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(how=how)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "meshwright: interrupted\n")


@pytest.mark.parametrize("name", all_commands())
def test_help_speaks_of_options_and_not_of_python(name, monkeypatch):
    command = all_commands()[name]
    for columns in (60, 200):
        monkeypatch.setattr("meshwright._text.screen_columns", lambda width=columns: width)
        text = help_text(command)
        assert not [word for word in ("None", "{", "--no-no-", "True", "False") if word in text]
        lines = text.partition("\n\nexamples\n")[0].splitlines()[1:]
        assert max(map(len, lines)) <= columns
    for example in command.examples:
        words = shlex.split(example.partition(" >")[0])
        assert words[:2] == ["meshwright", name]
        read_words(command, words[2:])
    assert len(command.examples) == 2


# What is typed before the tab, and what stands there after it.
COMPLETED = {
    "meshwright re": "rehearse",
    "meshwright mesh --sl": "--slices",
    "meshwright rehearse llama3-8b --compiler c": "cpu",
    "meshwright rehearse llama3-8": "llama3-8b",
}
_BASH = """
source {script}
for line in {typed}; do
  COMP_WORDS=($line); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _meshwright; echo "${{COMPREPLY[@]}}"
done
"""
_FISH = """
source {script}
for line in {typed}; complete --do-complete $line | string split -f1 \\t; end
"""
# A shell in a shell, since completion works at a prompt alone; its last key prints the line.
_ZSH = r"""
zmodload zsh/zpty; zpty shell zsh -f -i
zpty -w shell 'PROMPT=; source {script}'
zpty -w shell 'show() {{ zle -I; print -r -- "[$BUFFER]"; BUFFER=; }}'
zpty -w shell 'zle -N show; bindkey "^X" show'
zpty -w shell 'print rea""dy'; zpty -r -m shell seen '*ready*'
for line in {typed}; do
  zpty -w -n shell "$line"$'\t\x18'; zpty -r -m shell seen '*\[*\]*'
  print -r -- ${{${{${{seen##*\[}}%%\]*}}## #}}
done
"""


@pytest.mark.parametrize(("shell", "program"), [("bash", _BASH), ("zsh", _ZSH), ("fish", _FISH)])
def test_shells_complete_commands_options_and_values(shell, program, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    assert main(["completion", shell]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    typed = " ".join(f"'{line}'" for line in COMPLETED)
    words = [shell, "-c", program.format(script=script, typed=typed)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    ends = [line.split()[-1] for line in done.stdout.splitlines()]
    assert ends == list(COMPLETED.values())


def test_models_and_hardware_are_listed(capsys):
    def listed(*words):
        assert main(words) == 0
        return " ".join(capsys.readouterr().out.split())

    assert " llama3-8b 8,030,261,248 8,030,261,248 32 4096 8192 Decoder " in listed("models")
    assert " layers 4 embed 64 " in listed("models", "tiny")
    assert " h100 80 3.35 990 NVLink of 8 450 50 h100:8x4 " in listed("hardware")
    assert "slices: v6e:1x1, v6e:2x2, v6e:2x4, " in listed("hardware", "trillium")
    assert "machine types: a3-ultragpu-8g, p5e.48xlarge, " in listed("hardware", "h200")


def test_the_cache_is_shown_and_cleared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "meshwright"
    folder.mkdir()
    (folder / "a.rehearsal").write_bytes(b"x" * 2048)
    (folder / "notes.txt").write_text("not ours")
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"1 compiled program, 2 KiB of at most 2 GiB, in {folder}\n"
    assert main(["cache", "--clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cleared"] is True
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]


def test_idle_devices_are_noted_on_the_side():
    done = _run("mesh", "tp:4", "--on", "h100:8x2")
    assert done.returncode == 0
    assert done.stderr.startswith("note: 'tp:4' uses 4 of 16 devices; 12 stay idle, 1 whole host")


def test_no_colours_when_piped_and_colours_on_a_terminal():
    words = ["mesh", "fsdp:-1, tp:4", "--on", "v5e:4x4"]
    assert "\x1b[" not in _run(*words).stdout
    assert b"\x1b[" in on_a_terminal(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schedule", "gpipe", "--groups", "0", "--microbatches", "4"], "--groups: 0 is not"),
        (["schedule", "gpipe", "--groups", "2", "--microbatches", "0"], "--microbatches: 0 is not"),
        (
            ["schedule", "gpipe", "--groups", "2", "--microbatches", "4", "--latency", "-1"],
            "--latency: a time is a number from 0",
        ),
        (["rehearse", "tiny", *MESH, *ON, "--batch", "0"], "--batch: 0 is not"),
        (["rehearse", "tiny", *MESH, *ON, "--batch", "8", "--no-codegen"], "--no-codegen is for"),
        (["rehearse", "tiny", *MESH, *ON, "--batch", "8", "--seq", "99"], "or --set seq=99.\n"),
        (["rehearse", "tiny", *MESH, *ON, "--batch", "8", "--set", "remat=x"], "(--set remat=...)"),
        (
            ["rehearse", "tiny", *MESH, "--on", "v5e:2x4", "--batch", "8"],
            "pip install 'jax[tpu]'. Or go without it, --compiler cpu: simulated devices",
        ),
    ],
)
def test_a_message_writes_options_as_flags(capsys, monkeypatch, words, message):
    monkeypatch.setattr("meshwright._compat.compiler_installed", lambda family: False)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_slip_in_an_axis_name_is_noted_on_the_side():
    done = _run("mesh", "fdsp:-1", "--on", "v5e-16")
    assert done.returncode == 0
    assert done.stderr.startswith("note: axis 'fdsp' is taken for one of your own")
    assert "v5e:4x4" in done.stdout
