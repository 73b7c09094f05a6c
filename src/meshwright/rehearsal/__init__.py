"""The rehearsal. In: a function, shapes, a mesh. Out: what the real compiler makes of it.

Names are looked up when they are used: the compiling process needs few of them, and soon.
"""

from meshwright._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
