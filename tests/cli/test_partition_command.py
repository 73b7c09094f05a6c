"""`meshwright partition`, as a person and a script meet it."""

import json
import subprocess
import sys

import pytest

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
embed      bf16[32000@tp,4096@fsdp]    250 MiB    15.62 MiB       1
layers/up  bf16[8,4096@fsdp,14336@tp]  896 MiB       56 MiB       1
scale      f32[]                           4 B          4 B      16
whole on every device: 4 B, the largest scale 4 B
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
