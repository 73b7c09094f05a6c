"""The shardings. In: a tree and a mesh. Out: a spec per array, the placed or moved tree."""

from meshwright.partitioning.checkpoints import restore_checkpoint, save_checkpoint
from meshwright.partitioning.data import DataShard, data_shard
from meshwright.partitioning.decide import partition, shardings
from meshwright.partitioning.following import partition_like, shard_like
from meshwright.partitioning.helper import MeshPartitionHelper
from meshwright.partitioning.initialising import init
from meshwright.partitioning.moving import reshard
from meshwright.partitioning.placing import FromCallback, shard
from meshwright.partitioning.report import PartitionReport, describe

__all__ = [
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
]
