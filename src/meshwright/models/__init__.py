"""Models to try a plan on. In: a name. Out: a train step, its state, data, how they are split."""

from meshwright.models.base import Model
from meshwright.models.layouts import constrain
from meshwright.models.presets import model, names

__all__ = ["Model", "constrain", "model", "names"]
