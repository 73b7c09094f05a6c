"""Shardings. In: a tree and a mesh. Out: a `PartitionSpec` for every array, and a report.

Pure decisions, no device is touched. `decide` has `partition` and its options, and asks one of
`rules` (patterns over paths), `logical` (a name per dim) and `by_shape` (a scored choice).
`optimizer_state` copies specs to trees that follow the parameters, `data` says which rows a process
loads, and `report` shows what a partitioning costs.
"""
