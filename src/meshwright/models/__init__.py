"""Models to rehearse and to train. In: a name. Out: a train step, its state, data and shardings.

`presets` finds a model by its name; `base` says what every model offers; `decoder`, `mixture` and
`vision` are the families, made of `layers`, with `attention` by the kernel of the platform; `remat`
names what the backward pass may keep; `weights` describes parameters and their sharding, and
`training` holds the settings, the optimizer and the step that all of them share.
"""

from meshwright._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
