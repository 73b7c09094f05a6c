"""Plans with lists of the test's own choosing, and small arrays sharded like large ones."""

import dataclasses

import meshwright as mw
from meshwright.planning.plan_layouts import Layouts
from meshwright.planning.step_plan import Plan

# The models of tests are small: with the default of 64 KiB most of their weights would stay whole.
SMALLEST = 512


def with_lists(plan: Plan, lists=None, smallest: int = SMALLEST) -> Plan:
    """The plan with other lists, given by the names of groups, and with small arrays cut too."""
    old = plan.layouts
    if lists is not None:
        lists = tuple(tuple(plan.groups.index(name) for name in order) for order in lists)
    layouts = Layouts(old.costs, lists or old.lists, old.names, old.data, smallest)
    return dataclasses.replace(plan, layouts=layouts)


def forced_mix(function, *args, **options) -> Plan:
    """FSDP on one axis, all inner dims on another, the length of sequences on a third."""
    options = {"pipelines": False, **options}
    plan = mw.plan(function, *args, mesh="fsdp:2, tp:2, sp:2", **options)
    known = [name for name in ("batch", "embed") if name in plan.groups]
    long = [name for name in plan.groups if name == "seq"]
    inner = [name for name in plan.groups if name not in (*known, *long, "all weights")]
    return with_lists(plan, [known, inner, [*long, *reversed(inner)]])


def two_plans(function, *args, **options) -> dict[str, Plan]:
    """The best plan, and the best in which an axis tp shards a dim of the weights."""
    options = {"pipelines": False, **options}
    best = mw.plan(function, *args, **options)
    even = [
        name
        for name, sizes in zip(best.groups, best.costs.groups.sizes, strict=True)
        if name not in ("batch", "seq", "embed", "all weights")
        and not name.startswith("inner")
        and not sizes[0] % 2
    ]
    tp = mw.plan(function, *args, mesh="fsdp:4, tp:2", keep={even[0]: "tp"}, **options)
    return {"best": with_lists(best), "tp": with_lists(tp)}


def assert_equal_to_one_device(plan: Plan, *args) -> None:
    """The planned step gives what one device gives, up to rounding; something of it is cut."""
    verified = plan.verify(*args)
    exact = [row for row in verified.rows if row.difference <= row.tolerance]
    # Adam makes a full step of a gradient that is rounding alone; most arrays have more than that.
    assert verified.ok, str(verified)
    assert len(exact) > 0.5 * len(verified.rows), str(verified)
