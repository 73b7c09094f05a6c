"""The mesh layer for JAX: say what parallelism you want, on what hardware, and get the mesh.

import meshwright as mw

mesh = mw.mesh("dp:2, fsdp:-1, tp:4")             # on the devices that are here
mesh = mw.mesh("fsdp:-1, tp:8", on="v5p:8x8x8")   # on hardware that is not
print(mw.explain(mesh))                           # per axis: links, bandwidth, cost
"""

from meshwright._lazy import attach
from meshwright._version import __version__ as __version__

__getattr__, __dir__, __all__ = attach(__name__, __file__, "__version__")
