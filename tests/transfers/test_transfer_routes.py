"""Routes: every shard of the target is made once, of boxes that are where they are taken from."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import TransferError
from meshwright.transfers import links, message_plan, routes, transfer_plan

WHOLE = P()


def mesh(places, *sizes, names="ab"):
    devices = np.array(jax.devices())[list(places)].reshape(sizes or -1)
    return Mesh(devices, tuple(names[: devices.ndim]))


def end(places, *sizes, spec=WHOLE):
    return NamedSharding(mesh(places, *sizes), spec)


def shape_of(shape, sharding, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@st.composite
def ends(draw, shape=(8, 16)):
    """Any devices in any order and grid, and a spec that divides the shape."""
    places = draw(st.permutations(range(8)))
    sizes = draw(st.sampled_from([(1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (1, 2)]))
    at = mesh(places[: math.prod(sizes)], *sizes)
    entries = draw(st.permutations([*at.axis_names, None]))[: len(shape)]
    if draw(st.booleans()) and at.devices.ndim == 2:
        entries = draw(st.permutations([("b", "a"), None]))
    return NamedSharding(at, P(*entries))


@pytest.fixture
def share_devices(monkeypatch):
    """The eight devices as those of several processes: `share_devices(process of a device)`."""

    def share(process_of):
        message_plan.find_needs.cache_clear()
        for module in (message_plan, transfer_plan, routes, links):
            monkeypatch.setattr(module, "process_of", process_of)

    yield share
    message_plan.find_needs.cache_clear()


@pytest.fixture(params=[1, 2, 4, 8])
def processes(request, share_devices):
    share_devices(lambda device: owner(device, request.param))
    return request.param


def owner(device, count):
    return device.id * count // 8


def carried_out(route, values, count):
    """The chunks after all steps, done with numpy; no step takes what is not there."""
    plan, store = route.plan, {}
    for number, chunk in enumerate(plan.chunks):
        if route.items[chunk.item].source_boxes.get(chunk.device) == chunk.box:
            store[number] = part(values, chunk.box)
    for name in ("cut", "gather", "pack", "send", "join", "copy"):
        for step in getattr(plan, name):
            made, taken = plan.chunks[step.output], [plan.chunks[chunk] for chunk in step.inputs]
            same_device = all(chunk.device == made.device for chunk in taken)
            same_process = {owner(chunk.device, count) for chunk in (made, *taken)}
            assert same_device or name in ("gather", "send", "copy")
            assert len(same_process) == 1 or name == "send"
            room = np.full(tuple(stop - start for start, stop in made.box), -1, values.dtype)
            covered = np.zeros(room.shape, int)
            for chunk, number in zip(taken, step.inputs, strict=True):
                if name == "cut":
                    room[...] = part(store[number], within(made.box, chunk.box))
                    covered += 1
                else:
                    inner = tuple(slice(*side) for side in within(chunk.box, made.box))
                    room[inner] = store[number]
                    covered[inner] += 1
            assert (covered == 1).all()
            store[step.output] = room
    return store


def part(values, box):
    return values[tuple(slice(*side) for side in box)]


def within(box, outer):
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))


@settings(max_examples=40, deadline=None)
@given(source=ends(), target=ends())
def check_steps(count, source, target):
    values = np.arange(128).reshape(8, 16)
    route = mw.transfers.route(shape_of((8, 16), source), target)
    store = carried_out(route, values, count)
    for device, box in route.items[0].target_boxes.items():
        assert (store[route.target_chunk(0, device)] == part(values, box)).all()
    made = [step.output for step in (*route.plan.join, *route.plan.copy)]
    assert len(made) == len(set(made))
    # What crosses, crosses once for every process, however many of its devices need it.
    for process in route.receivers:
        needs = {
            box
            for device, box in route.items[0].target_boxes.items()
            if owner(device, count) == process
        }
        crossing = [
            size
            for (sender, receiver), size in route.traffic.items()
            if sender != receiver == process
        ]
        assert sum(crossing) <= 4 * sum(part(values, box).size for box in needs)


def test_every_shard_is_made_once_of_what_is_there(processes):
    check_steps(processes)


@settings(max_examples=40, deadline=None)
@given(source=ends(), target=ends())
def check_messages(count, source, target):
    values = np.arange(128, dtype=np.int32).reshape(8, 16)
    route = mw.transfers.route(shape_of((8, 16), source, "int32"), target)
    item = route.items[0]
    held = [np.full((8, 16), -1) for _ in range(count)]
    for device, box in item.source_boxes.items():
        part(held[owner(device, count)], box)[...] = part(values, box)
    messages = message_plan.plan_messages([item])
    for (sender, receiver), pieces in messages.items():
        assert sender != receiver
        for piece in pieces:
            given, room = (part(held[end], piece.overlap.box) for end in (sender, receiver))
            assert (given == part(values, piece.overlap.box)).all()
            assert piece.bytes == given.nbytes // 2  # of int32, written here as int64
            assert (room == -1).any()  # nobody is sent what it has
            room[...] = given
    for device, box in item.target_boxes.items():
        assert (part(held[owner(device, count)], box) == part(values, box)).all()
    assert message_plan.crosses_processes(item) == bool(messages)
    # What a route sends is never less: where one process has all of a shard, it sends it whole.
    crossing = sum(size for pair, size in route.traffic.items() if pair[0] != pair[1])
    assert sum(piece.bytes for pieces in messages.values() for piece in pieces) <= crossing


def test_messages_bring_every_process_what_it_lacks_and_no_more(processes):
    check_messages(processes)


def test_a_shard_comes_from_one_process_that_has_all_of_it_if_that_is_preferred(share_devices):
    share_devices(lambda device: device.id // 2)
    # Process 0 and 1 hold halves, process 2 holds all; process 1 needs all.
    source = end((0, 1, 2, 3, 4, 5), 3, 2, spec=P())
    (need,) = message_plan.find_needs(end((0, 2), spec=P("a")), end((6,)), (8,))
    load = message_plan.Load()
    assert [sender for sender, _ in message_plan.choose_senders(need, 4, load)] == [0, 1]
    halves = message_plan.find_needs(source, end((6,)), (8,))[0]
    chosen = [list(message_plan.choose_senders(halves, 4, load, prefer_one=True)) for _ in range(3)]
    # Two have sent half of an array already, so the third comes first.
    assert [senders[0][0] for senders in chosen] == [2, 0, 1]


def test_senders_are_chosen_by_bytes_not_by_count():
    load = message_plan.Load()
    sizes = [8, 1, 1, 1, 1, 1, 1, 1, 1, 4]
    chosen = [load.assign("send", "ab", size) for size in sizes]
    assert chosen == ["a", *"bbbbbbbb", "a"]
    assert load.assign("receive", "ab", 1) == "a"


def test_what_one_process_gives_to_a_shard_crosses_in_one_piece(share_devices):
    share_devices(lambda device: device.id // 4)
    route = mw.transfers.route(
        shape_of((8, 16), end(range(4), spec=P("a"))), end(range(4, 8), spec=P(None, "a"))
    )
    assert len(route.plan.send) == 4
    assert len(route.plan.pack) == 4
    assert route.plan.join == ()
    assert not route.joins_on_arrival
    assert route.traffic == {(0, 1): 512}
    # Each device of the source puts one shard together.
    assert {route.plan.chunks[step.output].device.id for step in route.plan.pack} == {0, 1, 2, 3}


def test_what_several_processes_give_is_joined_on_arrival(share_devices):
    share_devices(lambda device: device.id // 2)
    route = mw.transfers.route(
        shape_of((8, 16), end(range(4), spec=P("a"))), end(range(4, 8), spec=P(None, "a"))
    )
    assert route.joins_on_arrival
    assert "joined on arrival" in str(route)
    assert route.traffic == {(0, 2): 128, (0, 3): 128, (1, 2): 128, (1, 3): 128}
    assert str(route).splitlines()[-4:] == [
        "process 0 to 2: 128 B",
        "process 0 to 3: 128 B",
        "process 1 to 2: 128 B",
        "process 1 to 3: 128 B",
    ]


def test_replicas_take_turns_and_a_replicated_target_is_fed_once_a_process(share_devices):
    share_devices(lambda device: device.id // 2)
    tree = [shape_of((8,), end(range(4))) for _ in range(4)]
    route = mw.transfers.route(tree, end(range(4, 8)))
    chunks = route.plan.chunks
    givers = [chunks[step.inputs[0]].device.id for step in route.plan.send]
    takers = [chunks[step.output].device.id for step in route.plan.send]
    assert sorted(givers) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(takers) == [4, 4, 5, 5, 6, 6, 7, 7]
    assert len(route.plan.copy) == 8


def test_a_device_that_holds_its_shard_sends_nothing():
    route = mw.transfers.route(shape_of((8,), end(range(4))), end((2, 3, 4), spec=WHOLE))
    assert [route.plan.chunks[step.output].device.id for step in route.plan.send] == [4]


def test_equal_splits_travel_whole(share_devices):
    tree = {
        "same": shape_of((8, 16), end(range(4), spec=P("a"))),
        "turned": shape_of((8, 16), end(range(4), spec=P("a"))),
        "scalar": shape_of((), end(range(4))),
        "none": shape_of((0, 4), end(range(4), spec=P(None, "a"))),
    }
    targets = {
        "same": end(range(4, 8), spec=P("a")),
        "turned": end(range(4, 8), spec=P(None, "a")),
        "scalar": end(range(4, 8)),
        "none": end(range(4, 8), spec=P(None, "a")),
    }
    names = [item.where for item in mw.transfers.route(tree, targets).items]
    assert names == ["none", "same", "scalar", "turned"]
    assert links.whole_here(mw.transfers.route(tree, targets)) == {1, 2}
    share_devices(lambda device: device.id // 4)
    route = mw.transfers.route(tree, targets)
    # A replicated array crosses once, and is copied there.
    assert links.whole_pulled(route) == {1}
    assert links.whole_put(route) == {1}


def test_a_name_tells_routes_apart_and_is_the_same_for_the_same():
    def named(shape, source, target):
        return mw.transfers.route({"x": shape_of(shape, source)}, target).name

    first, last = end(range(4), spec=P("a")), end(range(4, 8), spec=P("a"))
    name = named((8, 8), first, last)
    assert name == named((8, 8), end(range(4), spec=P("a", None)), last)
    others = {
        named((8, 4), first, last),
        named((8, 8), first, end(range(4, 8))),
        named((8, 8), end((1, 0, 2, 3), spec=P("a")), last),
        mw.transfers.route({"y": shape_of((8, 8), first)}, last).name,
        mw.transfers.route({"x": shape_of((8, 8), first, "int32")}, last).name,
    }
    assert len(others) == 5
    assert name not in others


def test_a_route_shows_itself():
    route = mw.transfers.route(
        {"w": shape_of((8, 8), end(range(4), spec=P("a")), "bfloat16")}, end((7,))
    )
    assert str(route).splitlines() == [
        "1 array, 128 B: 4 devices to 1, 4 pieces, inside process 0",
        "path  array            from          to  pieces",
        "w     bf16[8,8]  4 of [2,8]  1 of [8,8]       4",
    ]
    assert "4 of [2,8]" in route._repr_html_()
    told = json.loads(json.dumps(route.to_json()))
    assert told["traffic"] == [{"from": 0, "to": 0, "bytes": 128}]
    assert told["arrays"][0]["to_devices"] == [7]
    assert told["senders"] == told["receivers"] == [0]


def test_a_route_has_a_short_repr():
    tree = {f"{'x' * 50}{n}": shape_of((8, 8), end(range(4), spec=P("a"))) for n in range(60)}
    route = mw.transfers.route(tree, end((7,)))
    assert repr(route).startswith("<Route 60 arrays, 15 KiB: 4 devices to 1, 240 pieces")
    assert len(repr(route)) <= 200


def test_a_long_route_is_cut_short():
    tree = [shape_of((), end((0,))) for _ in range(60)]
    text = str(mw.transfers.route(tree, end((1,))))
    assert text.splitlines()[-1] == "... and 10 more arrays"


def test_sources_may_be_named_apart_and_be_single_devices():
    device = SingleDeviceSharding(jax.devices()[1])
    route = mw.transfers.route(
        {"x": np.zeros((4, 4))}, {"x": end((2, 3), spec=P("a"))}, source=device
    )
    assert route.to_json()["arrays"][0]["from_devices"] == [1]


def test_a_route_moves_nothing_and_takes_arrays_too():
    array = jax.device_put(jnp.zeros(8), end(range(4), spec=P("a")))
    assert mw.transfers.route(array, end((5,))).bytes == 32


@pytest.mark.parametrize(
    ("tree", "target", "text"),
    [
        ({"x": "text"}, end((1,)), "'text' is no array or shape. Only arrays travel"),
        ({}, end((1,)), "holds no arrays. Pass at least one."),
        (None, None, "None holds no arrays. Pass at least one."),
        ({"x": np.zeros(4)}, end((1,)), "x: does not say where it lies. Pass source="),
        ({"x": shape_of((8,), end((0,)))}, "tp", "target: 'tp' is not a sharding"),
        ({"x": shape_of((8,), end((0,)))}, {"y": end((1,))}, "nor a tree of them like the arrays"),
        (
            {"x": shape_of((6, 8), end((0,)))},
            end(range(4), spec=P("a")),
            r"x: target: dim 0 has size 6, not divisible by 4",
        ),
        (
            {"x": shape_of((8,), end((0,)))},
            NamedSharding(AbstractMesh((2,), ("a",)), P("a")),
            "x: target: an AbstractMesh has no devices",
        ),
        (
            {"x": shape_of((8,), end((0,)))},
            NamedSharding(mesh((1,)), WHOLE, memory_kind="pinned_host"),
            "x: target: memory kind 'pinned_host' cannot be sent",
        ),
        (
            {"x": shape_of((8,), end((0,)))},
            NamedSharding(mesh((1,)), P(P.UNCONSTRAINED)),
            "x: target: .* leaves a dim open",
        ),
    ],
)
def test_what_cannot_be_routed_is_refused(tree, target, text):
    with pytest.raises(TransferError, match=text):
        mw.transfers.route(tree, target)


def test_a_source_that_does_not_fit_is_refused():
    with pytest.raises(TransferError, match=r"x: source: .* 2 entries for an array with 1 dim"):
        mw.transfers.route({"x": np.zeros(6)}, end((1,)), source=end(range(2), spec=P("a", None)))
    with pytest.raises(TransferError, match=r"x: source: 3 is not a sharding. Pass"):
        mw.transfers.route({"x": np.zeros(6)}, end((1,)), source=3)


def test_every_bad_array_is_named_at_once():
    tree = {"a": shape_of((6,), end((0,))), "b": shape_of((7,), end((0,)))}
    with pytest.raises(TransferError, match=r"2 problems, nothing was moved.\n  a: .*\n  b: "):
        mw.transfers.route(tree, end(range(4), spec=P("a")))


def test_a_tracer_is_refused():
    with pytest.raises(TransferError, match=r"x: a tracer. Transfers happen outside jit"):
        jax.jit(lambda x: mw.transfers.route({"x": x}, end((1,))))(1.0)


def test_platforms_do_not_mix():
    class Odd:
        platform = "gpu"

    class OddSharding:
        device_set = frozenset({Odd()})

    leaf = routes.walk(shape_of((8,), end((0,)))).arrays[0]
    problem = next(routes.pair_problems(leaf, end((0,)), OddSharding()))
    assert "from cpu to gpu. A route stays on one platform; meshwright.reshard" in problem


@pytest.mark.parametrize(
    ("spec", "kind", "text"),
    [
        (P(unreduced={"a"}), AxisType.Explicit, "asks for more than a split. Reduce the sum first"),
        (P(P.UNCONSTRAINED), AxisType.Auto, "leaves a dim open. Say how to split it, or None"),
    ],
)
def test_specs_that_are_no_split_are_refused(spec, kind, text):
    target = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("a",), axis_types=(kind,)), spec)
    with pytest.raises(TransferError, match=text):
        mw.transfers.route(shape_of((8,), end((0,))), target)
