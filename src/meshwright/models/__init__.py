"""Models to rehearse and to train. In: a name. Out: a train step, its state, data and shardings.

`presets` finds a model by its name; `base` says what every model offers; `decoder` and `vision` are
the families, made of `layers`; `weights` describes parameters and their sharding, and `training`
holds the settings, the optimizer and the step that all of them share.
"""

from meshwright.models.base import Model as Model
from meshwright.models.presets import model as model
from meshwright.models.presets import names as names
from meshwright.models.weights import constrain as constrain
