"""The report: well-formed, self-contained, nothing but what it is given, and small."""

import dataclasses
import re

import jax.numpy as jnp
import pytest
from markup import Reader

import meshwright as mw
from meshwright.hlo.instructions import Source
from meshwright.rehearsal.collectives.types import Collectives, ShardingConflict
from meshwright.rehearsal.memory import Buffer
from meshwright.report import page

HOSTILE = "</style></title><script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;"
ALWAYS = ["next", "memory", "time", "mesh", "collectives", "shardings"]


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
    return dataclasses.replace(
        result,
        request=dataclasses.replace(result.request, name=HOSTILE),
        compiler=HOSTILE,
        arguments=dataclasses.replace(result.arguments, rows=rows),
        collectives=Collectives(entries, (ShardingConflict(HOSTILE, HOSTILE, HOSTILE, HOSTILE),)),
        memory=dataclasses.replace(result.memory, buffers=(buffer,), chip=HOSTILE),
    )


def refused(result):
    memory = dataclasses.replace(result.memory, refused=True, temporaries=2**40, buffers=())
    return dataclasses.replace(result, memory=memory, collectives=Collectives(()), time=None)


def test_a_page_is_well_formed_and_has_its_sections_and_links(result):
    read = Reader(page(result))
    assert read.faults == []
    assert read.values("id", "section") == ALWAYS
    assert read.values("href") == [f"#{name}" for name in ALWAYS]


def test_a_page_with_everything_is_well_formed(larger, everything):
    read = Reader(page(larger, **everything))
    assert read.faults == []
    assert read.values("id", "section") == [*ALWAYS, "comparison", "pipeline", "training"]


@pytest.mark.parametrize("change", [hostile, refused, lambda result: result])
def test_a_notebook_gets_the_same_without_the_frame(result, change):
    read = Reader(change(result)._repr_html_())
    assert read.faults == []
    assert "html" not in read.tags and "script" not in read.tags
    assert read.tags.count("section") >= len(ALWAYS) - 1


def test_a_page_fetches_nothing_and_runs_nothing(larger, everything):
    text = page(larger, **everything)
    assert set(re.findall(r"https?:[^\"'\s<>)]*", text)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\([^)]*\)", text)) <= {"url(#mw-over)"}
    assert "@import" not in text
    read = Reader(text)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(read.tags)
    assert read.values("src") == []
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]


def test_names_cannot_become_markup(result):
    changed = hostile(result)
    losses = {HOSTILE: [2.0, 1.0]}
    text = page(changed, title=HOSTILE, training=losses, comparison=changed.compare(changed))
    read = Reader(text)
    assert read.faults == []
    assert "script" not in read.tags and "img" not in read.tags
    assert "<script" not in text and "<img" not in text
    assert any("alert('x')" in words for words in read.texts)


def test_a_schedule_cannot_become_markup(result):
    plan = mw.schedules.schedule("1f1b", groups=2, microbatches=2)
    drawn = mw.schedules.simulate(dataclasses.replace(plan, name=HOSTILE))
    read = Reader(page(result, pipeline={HOSTILE: drawn}))
    assert read.faults == []
    assert "script" not in read.tags and "img" not in read.tags


def test_the_page_of_a_large_model_is_below_a_megabyte(larger, everything):
    assert len(page(larger, **everything).encode()) < 1_000_000


def test_the_verdict_comes_first_with_its_numbers(result):
    text = page(result)
    head = text[text.index("<main>") : text.index("<section")]
    for words in ("fits", "to spare", "modelled step", "utilisation"):
        assert words in head
    assert result.memory.verdict().partition(": ")[2] in head


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


def test_a_stand_in_is_to_be_asked_again_with_the_real_compiler(result):
    placed = mw.place("fsdp:4, tp:2", "v5e:4x2")
    text = page(dataclasses.replace(result, placement=placed, stand_in=True))
    assert "pip install &#x27;meshwright[tpu]&#x27;" in text


def test_implicit_resharding_comes_first(result):
    entries = list(result.collectives)
    entries[-1] = dataclasses.replace(entries[-1], cause="implicit resharding")
    text = page(dataclasses.replace(result, collectives=Collectives(tuple(entries))))
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
    assert text.count("<table") == len(re.findall(r'tabindex="0"><table', text))


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
    return page(dataclasses.replace(result, collectives=Collectives((slow,)), time=time))


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
