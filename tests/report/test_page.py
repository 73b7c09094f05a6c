"""The report: well-formed, self-contained, nothing but what it is given, and small."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from markup import Reader, altered

import meshwright as mw
from meshwright._html import style
from meshwright.hlo.instructions import Source
from meshwright.rehearsal.collectives.types import Collectives, ShardingConflict
from meshwright.rehearsal.memory import Buffer
from meshwright.rehearsal.rendering import provenance
from meshwright.report import page

HOSTILE = "</style></title><script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;"
ALWAYS = ["next", "memory", "time", "mesh", "collectives", "shardings"]
SCRIPT = (Path(mw.__file__).parent / "_page.js").read_text(encoding="utf-8")
DATA = re.compile(r'<script type="application/json" id="meshwright-data">(.*?)</script>', re.S)


def hostile(result):
    """The same with a name that wants to be markup wherever a name can stand."""
    source = Source(HOSTILE, 7, HOSTILE)
    rows = tuple(
        dataclasses.replace(row, path=HOSTILE, text=HOSTILE) for row in result.arguments.rows
    )
    entries = tuple(
        dataclasses.replace(
            entry,
            shape=HOSTILE,
            kind=HOSTILE,
            links=HOSTILE,
            source=source,
            cause="implicit resharding",
        )
        for entry in result.collectives
    )
    buffer = Buffer(HOSTILE, HOSTILE, 2**20, f"jit/{HOSTILE}", source)
    conflict = ShardingConflict(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    return altered(
        result,
        collectives=Collectives(entries, (conflict,)),
        request=dataclasses.replace(result.request, name=HOSTILE),
        outcome=dataclasses.replace(result.outcome, compiler=HOSTILE),
        arguments=dataclasses.replace(result.arguments, rows=rows),
        memory=dataclasses.replace(result.memory, buffers=(buffer,), chip=HOSTILE),
    )


def refused(result):
    memory = dataclasses.replace(result.memory, refused=True, temporaries=2**40, buffers=())
    outcome = dataclasses.replace(result.outcome, verdict="exhausted", text="")
    return dataclasses.replace(result, memory=memory, outcome=outcome)


def test_a_page_is_well_formed_and_has_its_sections_and_links(result):
    read = Reader(page(result))
    assert read.faults == []
    assert read.values("id", "section") == [*ALWAYS, "repeat"]
    assert read.values("href") == [f"#{name}" for name in [*ALWAYS, "repeat"]]


def test_a_page_with_everything_is_well_formed(larger, everything):
    read = Reader(page(larger, **everything))
    assert read.faults == []
    assert read.values("id", "section") == [*ALWAYS, "comparison", "pipeline", "training", "repeat"]


@pytest.mark.parametrize("change", [hostile, refused, lambda result: result])
def test_a_notebook_gets_the_same_without_the_frame(result, change):
    read = Reader(change(result)._repr_html_())
    assert read.faults == []
    assert "html" not in read.tags and "script" not in read.tags
    assert read.tags.count("section") >= len(ALWAYS) - 1


def without_scripts(text):
    """The page without its two scripts, which are what they should be: its data, and our own."""
    first, second = re.findall(r"<script[^>]*>.*?</script>", text, re.S)
    assert DATA.fullmatch(first) and second == f"<script>{SCRIPT}</script>"
    return text.replace(first, "").replace(second, "")


def test_a_page_fetches_nothing_and_runs_nothing_of_its_text(larger, everything):
    text = without_scripts(page(larger, **everything))
    assert set(re.findall(r"https?:[^\"'\s<>)]*", text)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\([^)]*\)", text)) <= {"url(#mw-over)"}
    assert "@import" not in text
    assert not re.search(r"fetch|XMLHttp|innerHTML|eval|import|https?:", SCRIPT)
    read = Reader(text)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(read.tags)
    assert read.values("src") == []
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]


def test_names_cannot_become_markup(result):
    changed = hostile(result)
    losses = {HOSTILE: [2.0, 1.0]}
    whole = page(changed, title=HOSTILE, training=losses, comparison=changed.compare(changed))
    text = without_scripts(whole)
    read = Reader(text)
    assert read.faults == []
    assert "script" not in read.tags and "img" not in read.tags
    assert "<script" not in text and "<img" not in text
    assert any("alert('x')" in words for words in read.texts)
    assert json.loads(DATA.search(whole)[1])["name"] == HOSTILE


def test_the_numbers_and_how_to_repeat_them_are_in_the_page(result, tmp_path):
    text = result.save(tmp_path / "out.html").read_text(encoding="utf-8")
    data = json.loads(DATA.search(text)[1])
    origin = data.pop("provenance")
    assert data == json.loads(json.dumps(result.to_json()))
    command = "meshwright rehearse tiny --mesh 'fsdp:4, tp:2' --on cpu:8 --batch 16"
    assert origin["command"] == command
    assert f"meshwright {mw.__version__}, jax " in origin["versions"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", origin["date"])
    here = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(mw.__file__).parent, capture_output=True, text=True
    )
    assert origin["revision"].startswith(here.stdout.strip())
    shown = " ".join(Reader(text).texts)
    assert all(words in shown for words in origin.values())
    saved = json.loads(result.save(tmp_path / "out.json").read_text(encoding="utf-8"))
    assert saved["memory"] == data["memory"] and saved["provenance"]["command"] == command
    with pytest.raises(mw.errors.RehearsalError, match=r"'out.pdf' ends in neither .html nor"):
        result.save(tmp_path / "out.pdf")
    with pytest.raises(mw.errors.RehearsalError, match="there is no folder"):
        result.save(tmp_path / "none" / "out.html")
    (tmp_path / "taken.html").mkdir()
    with pytest.raises(mw.errors.RehearsalError, match=r"taken\.html: Is a directory"):
        result.save(tmp_path / "taken.html")


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["jobs/train.py", "--token", "secret"], "python train.py"),
        (["/bin/meshwright", "rehearse", "my:job"], "meshwright rehearse my:job"),
        (["-c"], ""),
    ],
)
def test_a_page_shows_our_command_or_the_scripts_name_and_none_of_its_flags(
    result, monkeypatch, argv, command
):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    own = dataclasses.replace(result, request=dataclasses.replace(result.request, layout=None))
    assert provenance(own)["command"] == command


def test_a_colour_has_one_meaning_on_a_page(larger, everything):
    text = page(larger, **everything)
    pairs = re.findall(r'<i style="background:(#\w+)"></i><span>([^<:]+)', text)
    meanings = {}
    for colour, name in pairs:
        meanings.setdefault(colour, set()).add(name)
    assert len(meanings) >= 10
    assert {colour: names for colour, names in meanings.items() if len(names) > 1} == {}
    tasks = set(re.findall(r'height="12" fill="(#\w+)"', text))
    assert len(tasks) >= 2 and not tasks & meanings.keys()
    # Cells of the mesh have the colour of their axis, which the lane of that axis has too.
    drawn = set(re.findall(r'class="cell"[^>]*fill="(#\w+)"', text))
    axes = {colour for colour, names in meanings.items() if names & {"dp", "fsdp", "tp"}}
    assert axes <= drawn and len(drawn) == 3


def test_a_schedule_cannot_become_markup(result):
    plan = mw.schedules.schedule("1f1b", groups=2, microbatches=2)
    drawn = mw.schedules.simulate(dataclasses.replace(plan, name=HOSTILE))
    read = Reader(without_scripts(page(result, pipeline={HOSTILE: drawn})))
    assert read.faults == []
    assert "script" not in read.tags and "img" not in read.tags


def test_the_page_of_a_large_model_is_below_a_megabyte_and_so_are_its_numbers(larger, everything):
    text = page(larger, **everything)
    assert len(without_scripts(text).encode()) < 1_000_000
    assert len(DATA.search(text)[1].encode()) < 1_000_000


def test_the_verdict_comes_first_with_its_numbers(result):
    text = page(result)
    head = text[text.index("<main>") : text.index("<section")]
    for words in ("fits", "to spare", "modelled step", "hardware utilisation", "tokens a second"):
        assert words in head
    assert f"<dd>{result.mfu:.0%}</dd>" in head and "CPU estimate" not in head
    assert result.memory.verdict().partition(": ")[2] in head


def test_tokens_and_model_flops_of_a_model_are_those_of_its_formula(result):
    assert result.tokens_per_second == pytest.approx(16 * 64 / result.time.total)
    assert result.model_flops * 8 == mw.models.model("tiny").flops(16, 64)
    assert result.model_flops == pytest.approx(result.time.model_flops, rel=0.1)


def test_what_does_not_fit_is_said_and_its_ways_out_are_drawn(result):
    changed = refused(result)
    ways = changed.remedies()
    text = page(changed, remedies=ways)
    assert "does not fit" in text
    assert "no program to time" in text
    assert ways
    for way in ways:
        assert text.count(way.what) + text.count(way.what.capitalize()) >= 2
    assert "url(#mw-over)" in text


def test_a_step_that_does_not_fit_is_not_advised_to_hold_more(result):
    text = page(refused(result))
    assert "more rows on a device" not in text
    assert "a larger batch" not in text


def test_a_stand_in_is_marked_and_to_be_asked_again_with_the_real_compiler(result):
    placed = mw.place("fsdp:4, tp:2", "v5e:4x2")
    estimate = dataclasses.replace(result, placement=placed, stand_in=True)
    text = page(estimate)
    assert "pip install &#x27;jax[tpu]&#x27;" in text
    head = text[text.index("<main>") : text.index("<section")]
    mark = '<span class="badge">CPU estimate</span>'
    assert head.count(mark) == 1 + head.count("<dt>")  # the verdict, and every tile
    assert f"<h2>What to do next{mark}</h2>" in text
    assert "CPU estimate" in estimate._repr_html_()


def test_implicit_resharding_comes_first(result):
    entries = list(result.collectives)
    entries[-1] = dataclasses.replace(entries[-1], cause="implicit resharding")
    text = page(altered(result, collectives=Collectives(tuple(entries))))
    causes = re.findall(r"<summary><i[^>]*></i><span>([a-z ]+):", text)
    assert causes[0] == "implicit resharding"
    assert "No implicit resharding" in page(result)
    assert "No implicit resharding" not in text


def test_pictures_say_in_words_what_they_show(larger, everything):
    text = page(larger, **everything)
    pictures = re.findall(r'<svg class="(?:bar|chart)"[^>]*>', text)
    assert len(pictures) >= 6
    for picture in pictures:
        assert 'role="img"' in picture
        assert re.search(r'aria-label="[^"]{8,}"', picture)


def test_wide_content_scrolls_in_a_box_that_the_keyboard_reaches(larger, everything):
    text = page(larger, **everything)
    assert text.count("<table") == len(re.findall(r'tabindex="0"><table', text)) > 5


def test_numbers_of_a_table_stand_to_the_right(result):
    text = page(result)
    assert re.search(r'<td class="number">[\d.]+ (B|KiB|MiB)</td>', text)


def test_a_run_of_losses_that_cannot_be_drawn_is_named(result):
    with pytest.raises(mw.errors.RehearsalError, match="'mine' needs two or more finite losses"):
        page(result, training={"mine": [1.0, float("nan")]})
    with pytest.raises(mw.errors.RehearsalError, match="'loss' needs two or more finite losses"):
        page(result, training=[1.0])


def test_only_rehearsals_make_a_page():
    with pytest.raises(mw.errors.RehearsalError, match=r"^page: 3 is not what rehearse"):
        page(3)


def test_a_pipeline_is_drawn_as_it_was_measured_or_explained(result):
    x = jnp.ones((8, 16))
    params = [jnp.eye(16), jnp.eye(16)]

    def loss(params, x):
        return jnp.mean(mw.stage_end(jnp.tanh(x @ params[0])) @ params[1])

    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp")
    step = mw.pipeline(loss, groups, schedule="1f1b", microbatches=2)
    asked = page(result, pipeline={"asked": step.explain(params, x)})
    assert Reader(asked).faults == [] and "Stages and predicted timeline" in asked
    measured = step.timeline(params, x)
    drawn = page(result, pipeline=measured)
    assert Reader(drawn).faults == [] and f"{measured.ratio:.2f} of it." in drawn


def waiting(result, **entry):
    """The advice of a page whose step waits for one collective nearly all of the time."""
    slow = dataclasses.replace(next(iter(result.collectives)), seconds=10.0, source=None, **entry)
    time = dataclasses.replace(result.time, exposed=10.0)
    return page(altered(result, collectives=Collectives((slow,)), time=time))


def test_the_advice_names_the_collective_that_a_step_waits_for(result):
    over = next(e.axes for e in result.collectives if e.over == "fsdp")
    other = next(e.axes for e in result.collectives if e.over == "tp")
    text = waiting(result, cause="implicit resharding")
    assert "of the step waits for communication" in text
    assert "constrain its operands to one sharding" in text
    text = waiting(result, cause="gradient sums", axes=over)
    assert "more rows on a device would share its cost" in text
    text = waiting(result, cause="activation exchanges", axes=other)
    assert "a smaller tp would send less" in text


def test_every_value_has_a_notebook_form_in_the_one_style(result):
    shown = [
        result,
        result.memory,
        result.time,
        result.remedies(),
        result.advice(),
        result.compare(result),
        result.arguments,
        result.placement,
        mw.MeshSpec.parse("dp:2*2, tp:-1"),
        mw.models.model("mixtral-8x7b"),
    ]
    for value in shown:
        text = value._repr_html_()
        read = Reader(text)
        assert read.faults == [] and "script" not in read.tags
        assert text.startswith(f'<div class="mw"><style>{style()}</style>')
        assert text.count("<style>") == 1
    memory, time, *_, spec, model = (value._repr_html_() for value in shown)
    assert 'class="bar"' in memory and 'class="bar"' in time
    assert "tensors split" in spec and "2 parts" in spec and "the rest" in spec
    assert "46,702,792,704 parameters, 12,879,925,248 of them for a token" in model


def test_a_large_tree_is_folded_by_its_branches_and_replicated_arrays_are_marked():
    tree = {
        name: {f"layer_{n}": {"w": jnp.ones((8, 8)), "b": jnp.ones(7)} for n in range(10)}
        for name in ("params", "mu", "nu")
    }
    text = mw.explain(tree, mw.mesh("fsdp:8"), min_shard_bytes=0)._repr_html_()
    assert text.count("<details>") == 3 and text.count("<table") == 3
    assert "params: 20 arrays, 2.773 KiB, 600 B on a device" in text
    assert text.count('<span class="badge">replicated</span>') == 30
    few = mw.explain(tree["mu"], mw.mesh("fsdp:8"), min_shard_bytes=0)._repr_html_()
    assert "<details>" not in few


def test_buffers_are_listed_by_layer_with_whole_paths_on_hover(result):
    source = Source("/somewhere/model/layers.py", 55, "attend")
    names = ("jit(f)/jvp(Net)/block_0/dot_general", "jit(f)/transpose(jvp(Net))/block_0/add")
    buffers = (
        *(Buffer(f"d{n}", "f32[8]", 2**20, name, source) for n, name in enumerate(names)),
        Buffer("c", "f32[8]", 2**19, "jit(f)/while/body/mul", source),
        Buffer("p", "f32[8]", 2**18, "state['params']['up']", None),
    )
    memory = dataclasses.replace(result.memory, buffers=buffers)
    text = page(dataclasses.replace(result, memory=memory))
    layers = re.findall(r"</span><span>([^<]*): ([\d.]+ \wiB) in (\d) buffers?</span>", text)
    assert layers == [
        ("Net/block_0", "2 MiB", "2"),
        ("attend", "512 KiB", "1"),
        ("state/params", "256 KiB", "1"),
    ]
    assert 'title="/somewhere/model/layers.py:55 in attend">layers.py:55</code>' in text


def test_nothing_need_be_computed_again_where_all_of_it_fits(result):
    def told(**recomputed):
        time = dataclasses.replace(result.time, recomputed=result.time.flops / 4, **recomputed)
        advice = altered(result, time=time).advice()
        return [each for each in advice if each.what.startswith("compute nothing again")]

    (fits,) = told(recomputed_bytes=2.0**20)
    assert fits.seconds == pytest.approx(result.time.compute / 4)
    assert fits.change.endswith(
        "--batch 16"
    )  # of a model by its name, which does not rematerialise
    assert told(recomputed_bytes=float(result.margin)) == []
