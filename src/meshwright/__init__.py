"""The mesh layer for JAX: say what parallelism you want, on what hardware, and get the mesh.

import meshwright as mw

mesh = mw.mesh("dp:2, fsdp:-1, tp:4")             # on the devices that are here
mesh = mw.mesh("fsdp:-1, tp:8", on="v5p:8x8x8")   # on hardware that is not
print(mw.explain(mesh))                           # per axis: links, bandwidth, cost
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwright._version import __version__

if TYPE_CHECKING:
    from meshwright import models as models
    from meshwright.axes import Role as Role
    from meshwright.axes import role as role
    from meshwright.errors import GroupError as GroupError
    from meshwright.errors import IdleDevicesWarning as IdleDevicesWarning
    from meshwright.errors import MeshError as MeshError
    from meshwright.errors import MeshOrderWarning as MeshOrderWarning
    from meshwright.errors import MeshwrightError as MeshwrightError
    from meshwright.errors import ModelError as ModelError
    from meshwright.errors import PartitionError as PartitionError
    from meshwright.errors import PipelineError as PipelineError
    from meshwright.errors import PlacementError as PlacementError
    from meshwright.errors import RehearsalError as RehearsalError
    from meshwright.errors import ScheduleError as ScheduleError
    from meshwright.errors import SpecError as SpecError
    from meshwright.errors import TopologyError as TopologyError
    from meshwright.errors import TransferError as TransferError
    from meshwright.hardware import Chip as Chip
    from meshwright.hardware import Topology as Topology
    from meshwright.hardware import topology as topology
    from meshwright.meshes import DeviceMeshManager as DeviceMeshManager
    from meshwright.meshes import abstract_mesh as abstract_mesh
    from meshwright.meshes import calculate_host_mesh_shape as calculate_host_mesh_shape
    from meshwright.meshes import check_same_order as check_same_order
    from meshwright.meshes import cpu_context as cpu_context
    from meshwright.meshes import create_cpu_mesh as create_cpu_mesh
    from meshwright.meshes import create_mesh as create_mesh
    from meshwright.meshes import explain as explain
    from meshwright.meshes import force_cpu as force_cpu
    from meshwright.meshes import merge_axes as merge_axes
    from meshwright.meshes import mesh as mesh
    from meshwright.meshes import parse_mesh_from_string as parse_mesh_from_string
    from meshwright.meshes import rename_axes as rename_axes
    from meshwright.meshes import split_axis as split_axis
    from meshwright.mpmd import Auto as Auto
    from meshwright.mpmd import Costs as Costs
    from meshwright.mpmd import Link as Link
    from meshwright.mpmd import MeshGroups as MeshGroups
    from meshwright.mpmd import MpmdArray as MpmdArray
    from meshwright.mpmd import MpmdMesh as MpmdMesh
    from meshwright.mpmd import MpmdSharding as MpmdSharding
    from meshwright.mpmd import PipelineStep as PipelineStep
    from meshwright.mpmd import Proof as Proof
    from meshwright.mpmd import Route as Route
    from meshwright.mpmd import Schedule as Schedule
    from meshwright.mpmd import Task as Task
    from meshwright.mpmd import Timeline as Timeline
    from meshwright.mpmd import Watch as Watch
    from meshwright.mpmd import allow_puts as allow_puts
    from meshwright.mpmd import check as check
    from meshwright.mpmd import compare_schedules as compare_schedules
    from meshwright.mpmd import connect as connect
    from meshwright.mpmd import from_groups as from_groups
    from meshwright.mpmd import pipeline as pipeline
    from meshwright.mpmd import read_schedule as read_schedule
    from meshwright.mpmd import route as route
    from meshwright.mpmd import schedule as schedule
    from meshwright.mpmd import simulate as simulate
    from meshwright.mpmd import stage as stage
    from meshwright.mpmd import to_groups as to_groups
    from meshwright.mpmd import value_and_grad as value_and_grad
    from meshwright.mpmd import write_schedule as write_schedule
    from meshwright.partitioning import DataShard as DataShard
    from meshwright.partitioning import FromCallback as FromCallback
    from meshwright.partitioning import MeshPartitionHelper as MeshPartitionHelper
    from meshwright.partitioning import PartitionReport as PartitionReport
    from meshwright.partitioning import data_shard as data_shard
    from meshwright.partitioning import describe as describe
    from meshwright.partitioning import init as init
    from meshwright.partitioning import partition as partition
    from meshwright.partitioning import partition_like as partition_like
    from meshwright.partitioning import reshard as reshard
    from meshwright.partitioning import restore_checkpoint as restore_checkpoint
    from meshwright.partitioning import save_checkpoint as save_checkpoint
    from meshwright.partitioning import shard as shard
    from meshwright.partitioning import shard_like as shard_like
    from meshwright.partitioning import shardings as shardings
    from meshwright.placement import AxisPlan as AxisPlan
    from meshwright.placement import Placement as Placement
    from meshwright.placement import place as place
    from meshwright.rehearsal import Clash as Clash
    from meshwright.rehearsal import Collective as Collective
    from meshwright.rehearsal import Ledger as Ledger
    from meshwright.rehearsal import Memory as Memory
    from meshwright.rehearsal import PipelineRehearsal as PipelineRehearsal
    from meshwright.rehearsal import Rehearsal as Rehearsal
    from meshwright.rehearsal import StepTime as StepTime
    from meshwright.rehearsal import rehearse as rehearse
    from meshwright.rehearsal import rehearse_model as rehearse_model
    from meshwright.rehearsal import rehearse_pipeline as rehearse_pipeline
    from meshwright.spec import AxisSpec as AxisSpec
    from meshwright.spec import MeshSpec as MeshSpec

# What is public, and the room it lives in. Rooms are loaded on first use, so that
# `import meshwright` costs next to nothing.
_ROOMS = {
    "axes": ("Role", "role"),
    "errors": (
        "GroupError",
        "IdleDevicesWarning",
        "MeshError",
        "MeshOrderWarning",
        "MeshwrightError",
        "ModelError",
        "PartitionError",
        "PipelineError",
        "PlacementError",
        "RehearsalError",
        "ScheduleError",
        "SpecError",
        "TopologyError",
        "TransferError",
    ),
    "hardware": ("Chip", "Topology", "topology"),
    "meshes": (
        "DeviceMeshManager",
        "abstract_mesh",
        "calculate_host_mesh_shape",
        "check_same_order",
        "cpu_context",
        "create_cpu_mesh",
        "create_mesh",
        "explain",
        "force_cpu",
        "merge_axes",
        "mesh",
        "parse_mesh_from_string",
        "rename_axes",
        "split_axis",
    ),
    "mpmd": (
        "Auto",
        "Costs",
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
    ),
    "partitioning": (
        "DataShard",
        "FromCallback",
        "MeshPartitionHelper",
        "PartitionReport",
        "data_shard",
        "describe",
        "init",
        "partition",
        "partition_like",
        "reshard",
        "restore_checkpoint",
        "save_checkpoint",
        "shard",
        "shard_like",
        "shardings",
    ),
    "placement": ("AxisPlan", "Placement", "place"),
    "rehearsal": (
        "Clash",
        "Collective",
        "Ledger",
        "Memory",
        "PipelineRehearsal",
        "Rehearsal",
        "StepTime",
        "rehearse",
        "rehearse_model",
        "rehearse_pipeline",
    ),
    "spec": ("AxisSpec", "MeshSpec"),
}
# Rooms that are reached by their own name, `mw.models.model("tiny")`.
_OPEN_ROOMS = ("models",)
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _OPEN_ROOMS:
        return importlib.import_module(f"meshwright.{name}")
    if name not in _HOME:
        from meshwright.errors import near

        raise AttributeError(
            f"module 'meshwright' has no attribute {name!r}.{near(name, (*_HOME, *_OPEN_ROOMS))}"
        )
    value = getattr(importlib.import_module(f"meshwright.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
