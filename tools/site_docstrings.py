"""Docstrings and signatures as the site's reference needs them.

`>>>` examples become highlighted blocks, a default that is a constant of ours (`TIMEOUT`) becomes
its value, and `**options` become the options, with their defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe


def fenced(text: str) -> str:
    """Put every run of `>>>` lines, with its output, into a fence of its own."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        prompt = line.startswith(">>> ")
        if prompt and not inside:
            lines += ["", "```pycon"]
            inside = True
        if inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line.partition("  # doctest: +")[0] if inside else line)
    return "\n".join([*lines, "```"] if inside else lines)


class FencedExamples(griffe.Extension):
    """Rewrites each docstring once, when its object is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


# Options that functions pass on, and the function whose defaults they have.
PASSED_ON = {
    "PartitionOptions": "meshwright.partitioning.decide.partition",
    "CompileOptions": "meshwright.rehearsal.api.rehearse",
    "MicrobatchOptions": "meshwright.pipelines.microbatching.value_and_grad",
}


class PlainSignatures(griffe.Extension):
    """Writes signatures out, once the package is read: values of constants, options by name."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        functions = list(walk(pkg))
        for function in functions:
            for parameter in function.parameters:
                name = str(parameter.default)
                if re.fullmatch(r"[A-Z][A-Z_]+", name):
                    constant = target(loader, function.resolve(name))
                    if isinstance(constant, griffe.Attribute):
                        parameter.default = constant.value
        for function in functions:
            function.parameters = griffe.Parameters(*written_out(loader, function))


def written_out(
    loader: griffe.GriffeLoader, function: griffe.Function
) -> Iterator[griffe.Parameter]:
    """The parameters, with those that `**options` stands for in its place."""
    for parameter in function.parameters:
        options = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if options is None or options[1] not in PASSED_ON:
            yield parameter
            continue
        defaults = loader.modules_collection[PASSED_ON[options[1]]].parameters
        for name, option in target(loader, function.resolve(options[1])).members.items():
            yield griffe.Parameter(
                name,
                annotation=option.annotation,
                kind=griffe.ParameterKind.keyword_only,
                default=defaults[name].default if name in defaults else "None",
            )


def target(loader: griffe.GriffeLoader, path: str) -> Any:
    """The object at a path, through imports."""
    value = loader.modules_collection[path]
    while isinstance(value, griffe.Alias):
        value = loader.modules_collection[value.target_path]
    return value


def walk(obj: griffe.Object) -> Iterator[griffe.Function]:
    """Every function and method in a package."""
    for member in obj.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, (griffe.Module, griffe.Class)):
            yield from walk(member)
