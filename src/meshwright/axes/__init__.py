"""The vocabulary. In: an axis name. Out: its `Role`: what the axis moves, and how much."""

from meshwright.axes.roles import ROLES, Role, intensities, role, weights

__all__ = ["ROLES", "Role", "intensities", "role", "weights"]
