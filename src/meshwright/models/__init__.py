"""Models to try a plan on. In: a name. Out: a train step, its state, data, how they are split."""

from meshwright.models.base import Model as Model
from meshwright.models.presets import model as model
from meshwright.models.presets import names as names
from meshwright.models.weights import constrain as constrain
