"""In: a mesh with one axis to cut, or a list of meshes. Out: groups that run different programs,
arrays that live in some of them, transfers between them, and schedules that are proved."""

from __future__ import annotations

from meshwright.mpmd.arrays import MpmdArray, MpmdSharding, from_groups, to_groups
from meshwright.mpmd.groups import Groups, MeshGroups, MpmdMesh, as_groups
from meshwright.mpmd.pipelines.asking import pipeline
from meshwright.mpmd.pipelines.marks import stage
from meshwright.mpmd.pipelines.regions import value_and_grad
from meshwright.mpmd.pipelines.step import PipelineStep
from meshwright.mpmd.schedules.auto import Auto
from meshwright.mpmd.schedules.compare import compare_schedules
from meshwright.mpmd.schedules.costs import Costs
from meshwright.mpmd.schedules.files.keeping import read_schedule, write_schedule
from meshwright.mpmd.schedules.named.catalogue import schedule
from meshwright.mpmd.schedules.proving import Proof, check
from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Task
from meshwright.mpmd.schedules.timeline import Timeline, simulate
from meshwright.mpmd.transfers import Link, Route, allow_puts, connect, route
from meshwright.mpmd.watching import Watch

__all__ = [
    "Auto",
    "Costs",
    "Groups",
    "Link",
    "MeshGroups",
    "MpmdArray",
    "MpmdMesh",
    "MpmdSharding",
    "PipelineStep",
    "Proof",
    "Route",
    "Schedule",
    "Task",
    "Timeline",
    "Watch",
    "allow_puts",
    "as_groups",
    "check",
    "compare_schedules",
    "connect",
    "from_groups",
    "pipeline",
    "read_schedule",
    "route",
    "schedule",
    "simulate",
    "stage",
    "to_groups",
    "value_and_grad",
    "write_schedule",
]
