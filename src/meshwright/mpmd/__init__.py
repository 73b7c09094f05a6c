"""In: a mesh with one axis to cut, or a list of meshes. Out: groups that run different programs,
arrays that live in some of them, transfers between them, and schedules that are proved."""

from __future__ import annotations

from meshwright.mpmd.arrays import MpmdArray, MpmdSharding, from_groups, to_groups
from meshwright.mpmd.groups import Groups, MeshGroups, MpmdMesh, as_groups
from meshwright.mpmd.schedules.auto import Auto
from meshwright.mpmd.schedules.compare import compare_schedules
from meshwright.mpmd.schedules.costs import Costs
from meshwright.mpmd.schedules.files.keeping import read_schedule, write_schedule
from meshwright.mpmd.schedules.named.catalogue import schedule
from meshwright.mpmd.schedules.proving import Proof, check
from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Task
from meshwright.mpmd.schedules.timeline import Timeline, simulate

__all__ = [
    "Auto",
    "Costs",
    "Groups",
    "MeshGroups",
    "MpmdArray",
    "MpmdMesh",
    "MpmdSharding",
    "Proof",
    "Schedule",
    "Task",
    "Timeline",
    "as_groups",
    "check",
    "compare_schedules",
    "from_groups",
    "read_schedule",
    "schedule",
    "simulate",
    "to_groups",
    "write_schedule",
]
