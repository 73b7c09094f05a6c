"""The rehearsal. In: a function, shapes, a mesh. Out: what the real compiler makes of it."""

from meshwright.rehearsal.ledger import Clash, Collective, Ledger
from meshwright.rehearsal.memory.use import Memory
from meshwright.rehearsal.of_models import rehearse_model
from meshwright.rehearsal.pipelines.rehearsing import rehearse_pipeline
from meshwright.rehearsal.pipelines.result import PipelineRehearsal
from meshwright.rehearsal.rehearsing import rehearse
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.timing.steptime import StepTime

__all__ = [
    "Clash",
    "Collective",
    "Ledger",
    "Memory",
    "PipelineRehearsal",
    "Rehearsal",
    "StepTime",
    "rehearse",
    "rehearse_model",
    "rehearse_pipeline",
]
