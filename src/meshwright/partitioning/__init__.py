"""The shardings. In: a tree and a mesh. Out: a `PartitionSpec` for every array, and why."""
