from meshwright.models.base import Model as Model
from meshwright.models.presets import model as model
from meshwright.models.presets import names as names
from meshwright.models.weights import constrain as constrain
