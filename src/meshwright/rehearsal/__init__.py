"""The rehearsal. In: a function, shapes, a mesh. Out: what the real compiler makes of it.

Names are looked up when they are used: the compiling process needs few of them, and soon.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.rehearsal.ledger import Clash as Clash
    from meshwright.rehearsal.ledger import Collective as Collective
    from meshwright.rehearsal.ledger import Ledger as Ledger
    from meshwright.rehearsal.memory.use import Memory as Memory
    from meshwright.rehearsal.of_models import rehearse_model as rehearse_model
    from meshwright.rehearsal.pipelines.rehearsing import rehearse_pipeline as rehearse_pipeline
    from meshwright.rehearsal.pipelines.result import PipelineRehearsal as PipelineRehearsal
    from meshwright.rehearsal.rehearsing import rehearse as rehearse
    from meshwright.rehearsal.result import Rehearsal as Rehearsal
    from meshwright.rehearsal.timing.steptime import StepTime as StepTime

_HOME = {
    "Clash": "ledger",
    "Collective": "ledger",
    "Ledger": "ledger",
    "Memory": "memory.use",
    "PipelineRehearsal": "pipelines.result",
    "Rehearsal": "result",
    "StepTime": "timing.steptime",
    "rehearse": "rehearsing",
    "rehearse_model": "of_models",
    "rehearse_pipeline": "pipelines.rehearsing",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
