"""`meshwright partition`, as a person and a script meet it."""

import json
import subprocess
import sys

import pytest

from meshwright.cli.main import main

MODEL = """
import jax

def shapes():
    return {
        "embed": jax.ShapeDtypeStruct((32000, 4096), "bfloat16"),
        "layers": {"up": jax.ShapeDtypeStruct((8, 4096, 14336), "bfloat16")},
        "scale": jax.ShapeDtypeStruct((), "float32"),
    }

not_a_function = 5
"""

GOLDEN = """\
3 arrays on fsdp:4, tp:4 (16 devices): 1.119 GiB, 71.63 MiB on each device
path       array                         bytes  on a device  copies
embed      bf16[32000@(tp,fsdp),4096]  250 MiB    15.62 MiB       1
layers/up  bf16[8,4096@fsdp,14336@tp]  896 MiB       56 MiB       1
scale      f32[]                           4 B          4 B      16
replicated: 4 B, the largest scale 4 B
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "my_model.py").write_text(MODEL)

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "meshwright", "partition", *words],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )

    return run


def test_the_table_of_a_users_tree(run):
    done = run("my_model:shapes", "--mesh", "fsdp:-1, tp:4", "--on", "v5e:4x4")
    assert (done.returncode, done.stdout, done.stderr) == (0, GOLDEN, "")


def test_json_and_rules_from_a_file(run, tmp_path):
    rules = tmp_path / "rules.json"
    rules.write_text('[["embed", ["fsdp", ["tp"]]], ["**", null]]')
    done = run("my_model:shapes", "--mesh", "fsdp:8, tp:4", "--rules", str(rules), "--json")
    found = json.loads(done.stdout)
    assert found["devices"] == 32
    assert [array["replicated"] for array in found["arrays"]] == [False, True, True]


def test_html_draws_the_cuts(run, tmp_path):
    done = run("my_model:shapes", "--mesh", "fsdp:8, tp:4", "--html", "out.html")
    assert done.returncode == 0
    page = (tmp_path / "out.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 2
    assert "src=" not in page and "<script" not in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["my_model", "--mesh", "fsdp:8"], "is not module:function"),
        (["my_modle:shapes", "--mesh", "fsdp:8"], "cannot import 'my_modle'"),
        (["my_model:shape", "--mesh", "fsdp:8"], "Did you mean 'shapes'?"),
        (["my_model:not_a_function", "--mesh", "fsdp:8"], "has no function"),
        (["my_model:shapes", "--mesh", "fsdp:0"], "size 0 is not allowed"),
        (["my_model:shapes", "--mesh", "fsdp:8", "--rules", "none.json"], "No such file"),
        (["my_model:shapes", "--mesh", "fsdp:8", "--rules", "bad.json"], "not JSON"),
        (["my_model:shapes", "--mesh", "fsdp:8", "--rules", "odd.json"], "is not a table"),
        (["my_model:shapes", "--mesh", "fsdp:8", "--rules", "lost.json"], "matches no leaf"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(run, tmp_path, words, message):
    (tmp_path / "bad.json").write_text("[[")
    (tmp_path / "odd.json").write_text("5")
    (tmp_path / "lost.json").write_text('[["nowhere", null], ["**", null]]')
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_rules_are_data_and_never_evaluated(run, tmp_path):
    (tmp_path / "evil.json").write_text("[[\"**\", \"__import__('os').mkdir('made')\"]]")
    done = run("my_model:shapes", "--mesh", "fsdp:8", "--rules", "evil.json")
    assert done.returncode == 2
    assert "no mesh axis" in done.stderr
    assert not (tmp_path / "made").exists()


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """The command in this process: much faster. Modules are named once, as Python keeps them."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)

    def here(text, *words, source="{}:f"):
        here.count += 1
        name = f"users_{tmp_path.name}_{here.count}"
        (tmp_path / f"{name}.py").write_text("import jax\nS = jax.ShapeDtypeStruct\n" + text)
        code = main(["partition", source.format(name), "--mesh", "fsdp:4, tp:2", *words])
        assert sys.path == before
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    here.count = 0
    return here


UNEVEN = "def f(): return {'embed': S((6, 64), 'float32'), 'head': S((128, 128), 'float32')}"


def test_the_options_of_partition_are_options_here(here, tmp_path):
    (tmp_path / "rules.json").write_text('{"embed": [["tp", "fsdp"]], "gone": null}')
    words = ["--rules", "rules.json", "--unmatched", "shape", "--unused", "allow"]
    code, out, _ = here(UNEVEN, *words, "--uneven", "replicate")
    assert code == 0
    assert "f32[6@tp,64]" in out and "f32[128@fsdp,128@tp]" in out
    code, out, _ = here(UNEVEN, "--min-shard-bytes", "65537")
    assert code == 0
    assert "f32[6,64]" in out and "f32[128,128]" in out
    code, out, _ = here(UNEVEN, "--min-shard-bytes", "0")
    assert code == 0
    assert "f32[6@tp,64@fsdp]" in out and "f32[128@fsdp,128@tp]" in out


def test_errors_name_options_as_they_are_written_here(here, tmp_path):
    (tmp_path / "rules.json").write_text('{"embed": "fsdp", "gone": null}')
    code, _, err = here(UNEVEN, "--rules", "rules.json")
    assert code == 2
    assert "rule 'gone' matches no leaf. Fix or remove it, or pass --unused allow." in err
    assert 'Add one, e.g. ["**", null], or pass --unmatched replicate or shape.' in err
    assert "Pad to 8, use another axis, or pass --uneven replicate to partition." in err
    code, _, err = here(UNEVEN, "--min-shard-bytes", "-1")
    assert code == 2
    assert "--min-shard-bytes: -1 is less than 0" in err


def test_a_rule_that_is_there_twice_is_refused(here, tmp_path):
    (tmp_path / "twice.json").write_text('{"embed": null, "embed": "tp"}')
    code, _, err = here(UNEVEN, "--rules", "twice.json")
    assert code == 2
    assert "twice.json: the rule 'embed' is there twice. Keep one." in err


def test_a_function_may_import_its_neighbours_late(here, tmp_path):
    (tmp_path / "late_neighbour.py").write_text("SIZE = 128")
    text = "def f():\n    import late_neighbour as n\n    return S((n.SIZE, n.SIZE), 'float32')"
    code, out, _ = here(text)
    assert code == 0
    assert "f32[128@fsdp,128@tp]" in out


def test_prints_of_the_function_do_not_mix_with_the_json(here):
    text = "print('loading')\ndef f():\n    print('making')\n    return S((64, 64), 'float32')"
    code, out, err = here(text, "--json")
    assert code == 0
    assert json.loads(out)["devices"] == 8
    assert "loading" in err and "making" in err


@pytest.mark.parametrize("value", ["3", "{}", "None", "'text'"])
def test_a_tree_without_arrays_is_refused(here, value):
    code, out, err = here(f"def f(): return {value}")
    assert (code, out) == (2, "")
    assert f"f returned {value}, which holds no arrays. Return a tree of arrays or of" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(size): return size", r":3) cannot be called without arguments: missing a required"),
        ("def f():\n    return 1 / 0", "f failed: ZeroDivisionError: division by zero ("),
        ("def f():\n    raise SystemExit(3)", "f failed: SystemExit: 3 ("),
        ("def f(:\n    pass", "SyntaxError: "),
        ("import no_such_thing_at_all", "ModuleNotFoundError: No module named 'no_such_thing"),
        ("raise KeyError('MODEL_SIZE')", "KeyError: 'MODEL_SIZE' ("),
    ],
)
def test_what_fails_in_the_users_code_is_one_line_with_file_and_line(here, tmp_path, text, message):
    code, out, err = here(text)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    line = 4 if "\n    r" in text else 3
    assert f"{tmp_path / 'users_'}" in err and f".py:{line})" in err


@pytest.mark.parametrize("source", ["./{}.py:f", "{}.py:f", "models/{}.py:f", ".{}:f"])
def test_a_file_in_place_of_a_module_is_refused_with_the_way_to_write_it(here, source):
    code, _, err = here("def f(): pass", source=source)
    assert code == 2
    assert "is not the name of a module. Give it as import does, from the folder it is in: " in err
