"""Rehearsing one of the models that come with the library."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import AbstractMesh

from meshwright.errors import RehearsalError, near
from meshwright.models import Model, model
from meshwright.partitioning import partition
from meshwright.partitioning.specs import make_spec
from meshwright.rehearsal.rehearsing import run
from meshwright.rehearsal.request import make_request
from meshwright.rehearsal.result import Rehearsal

_DEFAULTS: dict[str, Any] = {
    "on": None,
    "slices": 1,
    "dcn": None,
    "compiler": "vendor",
    "deadline": 900.0,
    "cache": True,
}


def rehearse_model(
    name: str | Model, *, batch: int, mesh: Any, seq: int | None = None, **options: Any
) -> Rehearsal:
    """`rehearse` for a train step of one of `meshwright.models`, sharded by its own rules.

    `batch` is that of the whole machine. The other options are those of `rehearse`.

    >>> import meshwright as mw
    >>> r = mw.rehearse_model("tiny", batch=16, mesh="fsdp:4, tp:2", on="cpu:8")
    >>> r.fits, r.name
    (True, 'tiny')
    """
    found = name if isinstance(name, Model) else model(name)
    for option in options:
        if option not in _DEFAULTS:
            of_model = option in {field.name for field in dataclasses.fields(found.config)}
            how = f" Change the model: models.model(name, {option}=...)." if of_model else ""
            raise RehearsalError(
                f"rehearse_model has no option {option!r}.{how or near(option, _DEFAULTS)}"
            )
    request = make_request(
        found.train_step,
        (found.shapes(), found.batch(batch, seq)),
        mesh=mesh,
        data=1,
        donate=0,
        name=found.name,
        specs=None,
        out=None,
        options={},
        **{**_DEFAULTS, **options},
    )
    lighter = None
    if found.config.remat != "full":
        lighter = model_with(found, remat="full").train_step

    def layout(on_mesh: AbstractMesh) -> tuple[Any, Any]:
        state = partition(request.args[0], on_mesh, rules=found.rules(on_mesh), unused="allow")
        return (state, found.batch_spec(on_mesh)), (state, make_spec())

    return run(dataclasses.replace(request, layout=layout, lighter=lighter))


def model_with(found: Model, **changes: Any) -> Model:
    """The same model with some settings changed."""
    return dataclasses.replace(found, config=dataclasses.replace(found.config, **changes))
