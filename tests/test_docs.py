"""Every example in the README and the docs is run, and so is every one in a docstring."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import pkgutil
import pydoc
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

import meshwright

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
REFERENCE = [page for page in PAGES if page.parent.name == "reference"]
# Pages of one subject run in one process, each with names of its own: starting JAX takes longer
# than most of them.
TOGETHER = {
    "partitioning": (
        "partitioning.md",
        "by_shape.md",
        "by_rules.md",
        "logical_axes.md",
        "partition_reports.md",
        "placing.md",
        "optimizer_state.md",
        "data_loading.md",
        "resharding.md",
        "flax_equinox.md",
    ),
    "pipelines": (
        "pipelines.md",
        "pipeline_explain.md",
        "pipeline_stages.md",
        "pipeline_processes.md",
        "cutting_pipelines.md",
    ),
    "groups": ("groups.md", "serving.md"),
    "rehearsal": ("rehearsal.md", "reading_a_rehearsal.md"),
    "concepts": (
        "index.md",
        "axes.md",
        "collectives.md",
        "guide.md",
        "faq.md",
        "troubleshooting.md",
        "watchdog.md",
    ),
}
SLOW = (
    "train_loop.md",
    "models.md",
    "rehearsal",
    "pipelines",
    "moving.md",
)  # they train and compile
SLOW_MODULES = (
    "meshwright.models.base",
    "meshwright.report",
    "meshwright.rehearsal.api",
    "meshwright.rehearsal.result",
)
FLAGS = doctest.ELLIPSIS
NAMESPACES = ("errors", "models", "rehearsal", "schedules", "transfers")
DOCUMENTED = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(meshwright.__path__, "meshwright.")
    if not module.name.endswith("__main__")
)


RUNNER = """
import doctest, pathlib, re, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
failed = 0
for page in map(pathlib.Path, sys.argv[1:]):
    text = "\\n".join(re.findall(r"```python\\n(.*?)```", page.read_text(), re.DOTALL))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert result.attempted == len(re.findall(r"^>>> ", text, re.MULTILINE)), (page, result)
    failed += result.failed
sys.exit(failed)
"""


def runs():
    """What runs in one process: the pages of a subject, or one page."""
    by_name = {page.name: page for page in PAGES if page.parent.name != "reference"}
    subjects = {name: [by_name.pop(page) for page in pages] for name, pages in TOGETHER.items()}
    alone = {name: [page] for name, page in by_name.items() if ">>> " in page.read_text()}
    return [
        pytest.param(pages, marks=[pytest.mark.slow] if name in SLOW else [], id=name)
        for name, pages in sorted({**subjects, **alone}.items())
    ]


@pytest.mark.parametrize("pages", runs())
def test_the_python_on_a_page_does_what_it_says(pages, tmp_path):
    """In a process of its own, as a reader would start it."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *(str(page.resolve()) for page in pages)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_on_a_page_print_what_it_shows(page):
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for entry in re.split(r"^\$ (?=\S)(?!\$)", block, flags=re.MULTILINE)[1:]:
            command, _, shown = entry.partition("\n")
            words = shlex.split(command)
            assert words[0] == "meshwright"
            done = subprocess.run(
                [sys.executable, "-m", "meshwright", *words[1:]],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.stdout + done.stderr == shown


def test_the_pages_have_examples():
    shown = sum(page.read_text().count(">>> ") for page in PAGES)
    assert shown > 40
    assert sum(page.read_text().count("$ meshwright") for page in PAGES) >= 4


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_MODULES else [])
        for name in MODULES
    ],
)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=FLAGS).failed == 0


def public_values():
    """Every public name, with its value: those of the package and those of its namespaces."""
    spaces = [meshwright, *(getattr(meshwright, name) for name in NAMESPACES)]
    return {
        f"{space.__name__}.{name}": getattr(space, name)
        for space in spaces
        for name in space.__all__
        if name != "__version__"
    }


def reference():
    """What the pages of the reference show, by its path."""
    shown = re.findall(r"^::: (\S+)", "\n".join(p.read_text() for p in REFERENCE), re.MULTILINE)
    assert len(shown) == len(set(shown)), "a name is shown twice"
    return {path: pydoc.locate(path) for path in shown}


def test_the_reference_shows_every_public_name():
    """Also after every module was imported: none may have taken the place of a name."""
    shown = reference()
    assert [path for path, value in shown.items() if value is None] == []
    known = {id(value) for value in shown.values()}
    assert [path for path, value in public_values().items() if id(value) not in known] == []


def test_every_public_name_method_and_property_has_a_docstring():
    without = []
    for path, value in {**public_values(), **reference()}.items():
        if not inspect.getdoc(value):
            without.append(path)
        for owner in value.__mro__ if isinstance(value, type) else ():
            if owner.__module__.startswith("meshwright."):
                without += [
                    f"{path}.{name}"
                    for name, member in vars(owner).items()
                    if not name.startswith("_")
                    and isinstance(member, DOCUMENTED)
                    and not inspect.getdoc(getattr(value, name))
                ]
    assert sorted(set(without)) == []


def test_every_public_function_has_an_example():
    functions = {
        path: value for path, value in public_values().items() if inspect.isfunction(value)
    }
    assert len(functions) > 40
    assert [path for path, value in functions.items() if ">>> " not in value.__doc__] == []


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_troubleshooting_quotes_messages_that_exist():
    """Headings are parts of our messages, with … for what differs."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## JAX itself")[0]
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    quoted = [
        part.strip(" ,;")
        for heading in re.findall(r"^### (.*)$", text, re.MULTILINE)
        for part in heading.split("…")
    ]
    assert len(quoted) > 20
    assert [part for part in quoted if part not in joined] == []
