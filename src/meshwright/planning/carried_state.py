"""Which results of a step are the arguments of the next: the new state in what it returns.

They must lie as the arguments do, or a loop of steps would compile a second program and reshard.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from meshwright.trees.split import Split, children_of

Shape = tuple[tuple[int, ...], Any]  # and dtype


# In: the arguments and what is returned, as trees with shapes. Out: number of a result -> number of
# the argument whose place it takes. A node of an argument matches the first node of the results
# with its structure and shapes, large nodes first; a lone array only where its argument is state.
# Example: step(state, x) -> (state, loss) gives result 0 -> array 0 and so on for the whole state.
def next_arguments(
    arguments: Sequence[Split],
    shapes: Sequence[Shape],
    returned: Split,
    result_shapes: Sequence[Shape],
    state: Collection[int],
) -> dict[int, int]:
    """Match results with the arguments of the next step."""
    results = {position: n for n, position in enumerate(returned.positions)}
    nodes: dict[tuple[int, int], list[tuple[int, Any]]] = collections.defaultdict(list)
    for start, node in _nodes(returned.treedef):
        nodes[node.num_nodes, node.num_leaves].append((start, node))
    carried: dict[int, int] = {}
    first = 0
    for number, part in enumerate(arguments):
        arrays = {position: first + n for n, position in enumerate(part.positions)}
        first += len(part.positions)
        lone = part.treedef.num_nodes == 1
        if lone and number not in state:
            continue
        queue = [(0, part.treedef)]
        while queue:
            start, node = queue.pop(0)
            if not node.num_leaves or (node.num_nodes == 1 and not lone):
                continue
            found = _find(
                nodes[node.num_nodes, node.num_leaves],
                node,
                [shapes[arrays[n]] if n in arrays else None for n in _leaves(start, node)],
                results,
                result_shapes,
                carried,
            )
            if found is None:
                queue += children_of(start, node)
                continue
            for mine, its in zip(_leaves(start, node), _leaves(found, node), strict=True):
                if mine in arrays:
                    carried[results[its]] = arrays[mine]
    return carried


def _find(
    candidates: list[tuple[int, Any]],
    node: Any,
    wanted: Sequence[Shape | None],
    results: dict[int, int],
    shapes: Sequence[Shape],
    taken: Collection[int],
) -> int | None:
    """Return where the first node of the results begins that can take a node's place."""
    for number, (start, other) in enumerate(candidates):
        if other != node:
            continue
        there = [results.get(n) for n in _leaves(start, other)]
        if any(n in taken for n in there if n is not None):
            continue
        if [None if n is None else shapes[n] for n in there] == list(wanted):
            del candidates[number]
            return start
    return None


def _leaves(start: int, node: Any) -> range:
    return range(start, start + node.num_leaves)


def _nodes(treedef: Any) -> Iterator[tuple[int, Any]]:
    queue = collections.deque([(0, treedef)])
    while queue:
        start, node = queue.popleft()
        yield start, node
        queue += children_of(start, node)
