"""Every example in the README and the docs is run, and so is every one in a docstring."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SLOW = (
    "train_loop.md",
    "models.md",
    "rehearsal.md",
    "pipelines.md",
    "moving.md",
)  # they train and compile
SLOW_MODULES = ("meshwright.models.base", "meshwright.report", "meshwright.rehearsal.api")
FLAGS = doctest.ELLIPSIS
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(meshwright.__path__, "meshwright.")
    if not module.name.endswith("__main__")
)


RUNNER = """
import doctest, pathlib, re, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
page = pathlib.Path(sys.argv[1])
text = "\\n".join(re.findall(r"```python\\n(.*?)```", page.read_text(), re.DOTALL))
test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
assert result.attempted == len(re.findall(r"^>>> ", text, re.MULTILINE)), result
sys.exit(result.failed)
"""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else [], id=page.name)
        for page in PAGES
    ],
)
def test_the_python_on_a_page_does_what_it_says(page):
    """In a process of its own, as a reader would start it."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(page)], capture_output=True, text=True, timeout=240
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


def test_every_public_function_and_class_is_documented_with_an_example():
    without = []
    for name in meshwright.__all__:
        value = getattr(meshwright, name)
        if callable(value) and not (isinstance(value, type) and issubclass(value, Warning)):
            if not value.__doc__:
                without.append(name)
    assert without == []


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
