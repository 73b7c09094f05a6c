"""Published runs become programs: `benchmarks/published.py` without the compiler."""

import json
import sys
from pathlib import Path

import pytest

import meshwright as mw

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rows():
    """The module that reads rows; benchmarks are no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import _published_rows

        yield _published_rows
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_every_recipe_has_a_program_of_the_published_size(rows):
    runs = []
    for name, row in rows.read_rows(BENCHMARKS / "data" / "tpu_recipes.json"):
        run = rows.build(name, row)
        runs.append(run)
        published = row["model"].get("parameters")
        if published:
            assert run.model.parameters == published
        assert run.batch % row["chips"] == 0
        assert run.seconds > 1
    assert len(runs) == 10
    by_name = {run.name: run for run in runs}
    light = by_name["llama3.1-405b v5p-1024"].model.config
    assert (light.remat, light.saved) == ("custom", ("decoder_layer_input",))
    assert light.offloaded == ("context", "mlpwo")
    assert light.tiles == 4
    old = by_name["MaxText-32B v5p-128"].model.config
    assert (old.attention, old.remat, old.gated, old.parallel) == ("pallas", "dots", False, True)
    # The batch that was measured, where the recipe's was changed later.
    assert by_name["llama2-70b v6e-256"].batch == 512


def test_transposed_weights_are_split_over_mlp(rows):
    [row] = [
        r for r in rows.read_rows(BENCHMARKS / "data" / "tpu_recipes.json") if "llama2" in r[0]
    ]
    rules = dict(rows.build(*row).model.rules(mw.abstract_mesh("fsdp:8")))
    assert rules["stages/*/mlp/up"][2] == rules["stages/*/mlp/down"][1] == "fsdp"
    assert rules["stages/*/attention/query"][1] == "fsdp"


def test_rows_without_a_program_say_why(rows):
    reasons, built = [], 0
    for name, row in rows.read_rows(BENCHMARKS / "data" / "published.csv"):
        try:
            rows.build(name, row)
            built += 1
        except rows.CannotBuild as reason:
            reasons.append(str(reason))
    assert built >= 6
    assert "a mixture of experts" in reasons
    assert any(reason.startswith("no global_batch") for reason in reasons)


def test_another_file_of_the_same_form_is_read(rows, tmp_path):
    [first, *_] = json.loads((BENCHMARKS / "data" / "tpu_recipes.json").read_text())["rows"]
    odd = first | {"name": "odd", "remat": {"policy": "every_other"}}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [first, odd]}))
    read = rows.read_rows(path)
    assert rows.build(*read[0]).name == first["name"]
    with pytest.raises(rows.CannotBuild, match="remat policy 'every_other'"):
        rows.build(*read[1])
