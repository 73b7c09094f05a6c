"""The command line that rehearses a request for one of the package's models."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from meshwright.errors import MeshwrightError
from meshwright.hardware.calibration_file import Calibration
from meshwright.models.presets import model as named_model
from meshwright.rehearsal.request import Request, batch_shape
from meshwright.spec.mesh_spec import MeshSpec


def rehearse_command(request: Request) -> str:
    """Write the command of a model's request; empty where none says the same.

    Such are models and settings without a name, meshes that are objects, and live devices by list.
    """
    settings = _settings(request)
    if settings is None or isinstance(request.mesh, (Mesh, AbstractMesh)):
        return ""
    if isinstance(request.speeds, Calibration) and not request.speeds.file:
        return ""
    if not isinstance(request.on, str | None) or not isinstance(request.dcn, str | None):
        return ""
    rows, length = batch_shape(request)
    words = ["meshwright", "rehearse", request.name, "--mesh", str(MeshSpec.parse(request.mesh))]
    if request.on is not None:
        words += ["--on", request.on]
    if request.slices != 1:
        words += ["--slices", str(request.slices)]
    if request.dcn is not None:
        words += ["--dcn", request.dcn]
    words += ["--batch", str(rows)]
    if length is not None and length != request.model.config.seq:  # type: ignore[union-attr]
        words += ["--seq", str(length)]
    if settings:
        words += ["--set", *settings]
    if request.compiler != "vendor":
        words += ["--compiler", request.compiler]
    if not request.codegen:
        words.append("--no-codegen")
    if request.speeds is not None:
        given = request.speeds
        words += ["--speeds", given.file if isinstance(given, Calibration) else os.fspath(given)]
    return shlex.join(words)


def changed_words(before: Request, after: Request) -> str:
    """Return what of a command differs from that of another request: options with new values."""
    old, new = (_by_option(shlex.split(rehearse_command(each))) for each in (before, after))
    new["--set"] = _changed_settings(before, after)
    words: list[str] = []
    for option, values in new.items():
        changed = [value for value in values if value not in old.get(option, ())]
        words += [option, *changed] if changed else []
    dropped = [option for option in old if option not in new]
    return " ".join([shlex.join(words), *(f"without {option}" for option in dropped)]).strip()


def _changed_settings(before: Request, after: Request) -> list[str]:
    """The settings of a model that differ from another request's, those of its name too."""
    old, new = (getattr(each.model, "config", None) for each in (before, after))
    if old is None or new is None:
        return []
    values = {field.name: getattr(new, field.name) for field in dataclasses.fields(new)}
    changed = {name: value for name, value in values.items() if value != getattr(old, name)}
    return [f"{name}={_value(value)}" for name, value in changed.items()]


def _by_option(words: list[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--") or not options:
            options[word] = []
        else:
            options[next(reversed(options))].append(word)
    return options


def _settings(request: Request) -> list[str] | None:
    """The settings of a model that are not those of its name, or `None` without such a name."""
    model = request.model
    if model is None:
        return None
    try:
        plain = named_model(model.name)
    except MeshwrightError:
        return None
    if type(plain.config) is not type(model.config):
        return None
    changes = []
    for field in dataclasses.fields(model.config):
        value = getattr(model.config, field.name)
        if value == getattr(plain.config, field.name):
            continue
        text = _value(value)
        if text is None:
            return None
        changes.append(f"{field.name}={text}")
    return changes


def _value(value: Any) -> str | None:
    """A setting as `--set` reads it; `None` where it cannot."""
    if isinstance(value, str):
        return value or None  # an empty value is refused
    if isinstance(value, tuple) and not value:
        return "[]"
    if isinstance(value, (bool, int, float, tuple)):
        return json.dumps(value)
    return None
