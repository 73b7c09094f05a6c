# Every public name, once; `meshwright.__init__` looks them up here on first use.
from meshwright import errors as errors
from meshwright import models as models
from meshwright import rehearsal as rehearsal
from meshwright import report as report
from meshwright import schedules as schedules
from meshwright import transfers as transfers
from meshwright.calibration.calibrate import calibrate as calibrate
from meshwright.calibration.comparison import compare_calibrations as compare_calibrations
from meshwright.calibration.measure import measure as measure
from meshwright.calibration.measurement import Measurement as Measurement
from meshwright.calibration.pipeline_measurement import (
    PipelineMeasurement as PipelineMeasurement,
)
from meshwright.checkpoints.async_saves import Checkpoints as Checkpoints
from meshwright.checkpoints.checkpoint import restore_checkpoint as restore_checkpoint
from meshwright.checkpoints.checkpoint import save_checkpoint as save_checkpoint
from meshwright.checkpoints.resume import Resumed as Resumed
from meshwright.checkpoints.resume import resume as resume
from meshwright.hardware.calibration_file import Calibration as Calibration
from meshwright.hardware.topology import Topology as Topology
from meshwright.hardware.topology import topology as topology
from meshwright.interfaces.mesh_creation import DeviceMeshManager as DeviceMeshManager
from meshwright.interfaces.mesh_creation import (
    calculate_host_mesh_shape as calculate_host_mesh_shape,
)
from meshwright.interfaces.mesh_creation import cpu_context as cpu_context
from meshwright.interfaces.mesh_creation import create_cpu_mesh as create_cpu_mesh
from meshwright.interfaces.mesh_creation import create_mesh as create_mesh
from meshwright.interfaces.mesh_creation import force_cpu as force_cpu
from meshwright.interfaces.mesh_creation import parse_mesh_from_string as parse_mesh_from_string
from meshwright.interfaces.partition_helper import MeshPartitionHelper as MeshPartitionHelper
from meshwright.meshes.build import abstract_mesh as abstract_mesh
from meshwright.meshes.build import mesh as mesh
from meshwright.meshes.views import check_same_order as check_same_order
from meshwright.meshes.views import merge_axes as merge_axes
from meshwright.meshes.views import rename_axes as rename_axes
from meshwright.meshes.views import split_axis as split_axis
from meshwright.mpmd.arrays import MpmdArray as MpmdArray
from meshwright.mpmd.assign import from_groups as from_groups
from meshwright.mpmd.assign import to_groups as to_groups
from meshwright.mpmd.groups import MeshGroups as MeshGroups
from meshwright.mpmd.groups import MpmdMesh as MpmdMesh
from meshwright.mpmd.mpmd_sharding import MpmdSharding as MpmdSharding
from meshwright.partitioning.data import DataShard as DataShard
from meshwright.partitioning.data import data_shard as data_shard
from meshwright.partitioning.decide import partition as partition
from meshwright.partitioning.decide import shardings as shardings
from meshwright.partitioning.optimizer_state import partition_like as partition_like
from meshwright.partitioning.report import explain as explain
from meshwright.pipelines.api import pipeline as pipeline
from meshwright.pipelines.microbatching import value_and_grad as value_and_grad
from meshwright.pipelines.trace_marks import stage_end as stage_end
from meshwright.placement.placer import place as place
from meshwright.planning.api import plan as plan
from meshwright.planning.marked_blocks import block as block
from meshwright.planning.step_plan import Plan as Plan
from meshwright.rehearsal.api import rehearse as rehearse
from meshwright.rehearsal.api import rehearse_model as rehearse_model
from meshwright.rehearsal.pipelines import rehearse_pipeline as rehearse_pipeline
from meshwright.rehearsal.verifier import verify as verify
from meshwright.spec.mesh_spec import MeshSpec as MeshSpec
from meshwright.transfers.device_put import FromCallback as FromCallback
from meshwright.transfers.device_put import shard as shard
from meshwright.transfers.device_put import shard_like as shard_like
from meshwright.transfers.resharding import reshard as reshard
from meshwright.transfers.sharded_init import init as init
from meshwright.watchdog.watchdog import Watchdog as Watchdog

__version__: str
