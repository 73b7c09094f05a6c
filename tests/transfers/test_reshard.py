"""Trees move from any mesh and split to any other, bit for bit; what cannot is refused at once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from memory_scripts import needs_clear_refs, run_script

import meshwright as mw
from meshwright import _compat
from meshwright.errors import PartitionError
from meshwright.transfers import message_plan, moves, ppermute_transport, resharding

DTYPES = (
    *("bool", "int4", "uint4", "int8", "uint16", "int32", "float16", "bfloat16", "float32"),
    *("float8_e4m3fn", "float8_e5m2", "complex64", "int64", "float64", "complex128"),
)
WHOLE = P()


def mesh(places, *sizes, names="ab", types=None):
    devices = np.array(jax.devices())[list(places)].reshape(sizes or -1)
    axes = tuple(names[: devices.ndim])
    return Mesh(devices, axes, axis_types=(types or AxisType.Auto,) * devices.ndim)


def pattern(shape, dtype="float32", seed=0):
    """Any bits the dtype knows: NaNs of all kinds, negative zeros, subnormals."""
    draw = np.random.default_rng(seed)
    if dtype in ("int4", "uint4"):
        low = -8 if dtype == "int4" else 0
        return draw.integers(low, low + 16, shape).astype(np.int8).astype(jnp.dtype(dtype))
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    raw = draw.bytes(math.prod(shape) * jnp.dtype(dtype).itemsize)
    return np.frombuffer(raw, jnp.dtype(dtype)).reshape(shape)


def on(values, at, spec=WHOLE):
    with jax.enable_x64(True):
        return jax.make_array_from_callback(
            values.shape, NamedSharding(at, spec), lambda index: values[index], dtype=values.dtype
        )


def assert_is(array, values, at=None, spec=None):
    """Every shard holds exactly these bits, and lies where it shall."""
    assert array.dtype == values.dtype
    assert array.shape == values.shape
    assert array.is_fully_addressable
    if at is not None:
        assert array.sharding == NamedSharding(at, spec)
        assert [shard.device for shard in array.addressable_shards] == list(at.devices.flat)
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


@st.composite
def meshes(draw):
    places = draw(st.permutations(range(8)))
    sizes = draw(
        st.sampled_from([(1,), (2,), (3,), (8,), (2, 2), (3, 2), (4, 2), (2, 4), (2, 2, 2)])
    )
    return mesh(places[: math.prod(sizes)], *sizes, names="abc")


@st.composite
def specs_for(draw, shape, at):
    """Axes dealt out to dims that they divide, in any order; some are left over."""
    entries = [[] for _ in shape]
    for axis in draw(st.permutations(at.axis_names)):
        fits = [
            dim
            for dim, size in enumerate(shape)
            if size % math.prod(at.shape[name] for name in (*entries[dim], axis)) == 0
        ]
        dim = draw(st.sampled_from([None, *fits]))
        if dim is not None:
            entries[dim].append(axis)
    return P(*(tuple(entry) or None for entry in entries))


@st.composite
def journeys(draw):
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 4, 6, 8, 12, 24]), max_size=3)))
    source, target = draw(meshes()), draw(meshes())
    ends = source, draw(specs_for(shape, source)), target, draw(specs_for(shape, target))
    return shape, draw(st.sampled_from(DTYPES)), *ends


@settings(max_examples=150, deadline=None, derandomize=True)
@given(journeys(), st.booleans(), st.booleans())
def test_any_move_keeps_every_bit(journey, donate, small):
    shape, dtype, source, source_spec, target, spec = journey
    values = pattern(shape, dtype)
    array = on(values, source, source_spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resharding, "_SMALL", resharding._SMALL if small else -1)
        result = mw.reshard({"x": array}, target, {"x": spec}, donate=donate)["x"]
    assert_is(result, values, target, spec)
    if not donate:
        assert_is(array, values, source, source_spec)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(journeys())
def test_any_move_keeps_every_bit_by_compiled_programs(journey):
    """What accelerators do between equal sets of devices."""
    shape, dtype, source, source_spec, target, spec = journey
    if set(source.devices.flat) != set(target.devices.flat):
        target, spec = source, P()
    values = pattern(shape, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resharding, "_on_cpu", lambda target: False)
        result = mw.reshard(on(values, source, source_spec), target, spec)
    assert_is(result, values, target, spec)


@pytest.mark.parametrize("size", [(64, 64), (1024, 640)])
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda values: values, id="host"),
        pytest.param(jnp.asarray, id="uncommitted"),
        pytest.param(lambda values: jax.device_put(values, jax.devices()[3]), id="one device"),
        pytest.param(lambda values: on(values, mesh(range(4)), P("a")), id="four"),
        pytest.param(lambda values: on(values, mesh(range(8))), id="replicated"),
    ],
)
@pytest.mark.parametrize(
    ("places", "spec"),
    [(range(8), P("a")), ((5, 2), P(None, "a")), ((6, 7, 4), P()), ((3,), P())],
)
def test_small_and_large_arrays_move_from_anywhere(size, source, places, spec):
    values, at = pattern(size), mesh(places)
    array = source(values)
    assert_is(mw.reshard(array, at, spec), values, at, spec)
    assert np.asarray(array).tobytes() == values.tobytes()


def test_keys_move():
    keys = jax.random.split(jax.random.key(7), 8)
    data = np.asarray(jax.random.key_data(keys))
    first = mw.reshard(keys, mesh(range(4)), P("a"))
    second = mw.reshard(first, mesh((7, 2), names="z"), P("z"), donate=True)
    assert second.dtype == keys.dtype
    assert second.sharding.is_equivalent_to(NamedSharding(mesh((7, 2), names="z"), P("z")), 1)
    assert np.array_equal(jax.random.key_data(second), data)
    other = jax.random.key(3, impl="rbg")
    assert jax.random.key_impl(mw.reshard(other, mesh((1,)), P())) == jax.random.key_impl(other)


def test_64_bit_arrays_stay_so_with_x64_off():
    values = pattern((8, 4), "float64")
    assert not jax.config.jax_enable_x64
    assert_is(mw.reshard(on(values, mesh(range(8)), P("a")), mesh((1, 0)), P(None, "a")), values)


def test_other_leaves_pass_through():
    tree = {"n": 3, "s": "text", "f": len, "none": None, "w": np.ones(8, np.float32)}
    result = mw.reshard(tree, mesh(range(2)), P("a"))
    assert (result["n"], result["s"], result["f"], result["none"]) == (3, "text", len, None)
    assert_is(result["w"], tree["w"], mesh(range(2)), P("a"))


def test_specs_may_be_a_prefix():
    tree = {"a": {"w": np.ones((4, 4)), "b": np.zeros(4)}, "c": np.ones((2, 2))}
    tree = jax.tree.map(np.float32, tree)
    at = mesh(range(2))
    result = mw.reshard(tree, at, {"a": P("a"), "c": P(None, "a")})
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(result)] == [
        P("a"),
        P("a"),
        P(None, "a"),
    ]
    assert mw.reshard({}, at, {}) == {}


def test_axis_types_and_a_mesh_in_force_change_nothing():
    values = pattern((8, 8))
    explicit = mesh(range(8), 4, 2, types=AxisType.Explicit)
    with jax.set_mesh(explicit):
        first = mw.reshard(on(values, mesh(range(3))), explicit, P("b", "a"))
        second = mw.reshard(first, mesh((6, 1)), P(None, "a"))
    assert_is(first, values, explicit, P("b", "a"))
    assert_is(second, values, mesh((6, 1)), P(None, "a"))


@pytest.mark.parametrize("shape", [(8, 8), (1024, 640)])
def test_an_array_in_other_memory_comes_to_the_device(shape):
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    default = jax.devices()[0].default_memory().kind
    for kind in kinds - {default}:
        values, at = pattern(shape), mesh(range(4))
        there = jax.device_put(values, NamedSharding(at, P("a"), memory_kind=kind))
        for target, spec in ((at, P("a")), (at, P()), (mesh((3, 2, 1, 0)), P("a"))):
            result = mw.reshard(there, target, spec)
            assert_is(result, values, target, spec)
            assert result.sharding.memory_kind == default
            assert {shard.data.sharding.memory_kind for shard in result.addressable_shards} == {
                default
            }


def test_what_lies_as_asked_is_not_copied():
    array = on(pattern((8, 8)), mesh(range(8)), P("a"))
    same = mw.reshard(array, mesh(range(8)), P("a"))
    assert same is array
    renamed = mw.reshard(array, mesh(range(8), names="z"), P("z"))
    assert renamed.sharding.spec == P("z")
    assert pointers(renamed) == pointers(array)


@pytest.mark.parametrize("size", [1 << 8, 1 << 18])
def test_host_memory_is_never_shared_with_the_result(size):
    values = moves.aligned_empty((size,), np.dtype("float32"))
    values[:] = 0
    for at, spec in ((mesh((0,)), P()), (mesh(range(4)), P("a")), (mesh(range(2)), P())):
        result = mw.reshard(values, at, spec)
        values += 1
        assert np.asarray(result)[0] == values[0] - 1


def test_an_array_held_twice_stays_one():
    array = on(pattern((8, 8)), mesh(range(8)), P("a"))
    result = mw.reshard([array, array], mesh(range(4)), P("a"), donate=True)
    assert result[0] is result[1]
    assert array.is_deleted()


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("shape", [(8, 8), (1024, 640)])
def test_donated_arrays_are_given_up(shape):
    values = pattern(shape)
    tree = {"x": on(values, mesh(range(8)), P("a")), "host": values}
    result = mw.reshard(tree, mesh(range(4)), P(None, "a"), donate=True)
    assert tree["x"].is_deleted()
    assert_is(result["x"], values)
    assert_is(result["host"], values)


@pytest.mark.parametrize(
    "look",
    [
        np.asarray,
        str,
        lambda array: array.addressable_data(0),
        lambda array: [np.asarray(shard.data) for shard in array.addressable_shards],
        lambda array: str(array.addressable_data(0)),
    ],
)
@pytest.mark.parametrize(("places", "spec"), [(range(8), P()), (range(8), P("a")), ((2,), P())])
def test_donated_arrays_are_given_up_even_if_they_were_looked_at(look, places, spec):
    values = pattern((8, 8))
    array = on(values, mesh(places), spec)
    look(array)
    result = mw.reshard(array, mesh((3, 6)), P(None, "a"), donate=True)
    assert array.is_deleted()
    assert_is(result, values)


def test_donating_leaves_a_copy_on_one_device_alone():
    values = pattern((8, 8))
    array = on(values, mesh(range(8)))
    single = jax.device_put(array, jax.devices()[2])
    assert pointers(single) == pointers(array)[2:3]
    mw.reshard(array, mesh((3, 6)), P("a"), donate=True)
    assert_is(single, values)


@pytest.mark.parametrize("shape", [(8, 8), (1024, 640)])
def test_donating_breaks_no_array_that_shares_memory(shape):
    values = pattern(shape)
    everything = mesh(range(8))
    split, copies = on(values, everything, P("a")), on(values, everything)
    others = [
        jax.device_put(split, NamedSharding(mesh(range(8), names="z"), P("z"))),
        jax.device_put(copies, NamedSharding(mesh(range(4)), P())),
    ]
    assert pointers(others[0]) == pointers(split)
    assert pointers(others[1]) == pointers(copies)[:4]
    result = mw.reshard([split, copies], mesh((5, 6)), P(None, "a"), donate=True)
    for array in (*others, split, copies, *result):
        assert_is(array, values)


@pytest.mark.parametrize("shape", [(8, 8), (1024, 1280)])
def test_leaves_that_share_memory_can_be_donated_together(shape):
    values = pattern(shape)
    array = on(values, mesh(range(8)), P("a"))
    alias = jax.device_put(array, NamedSharding(mesh(range(8), names="z"), P("z")))
    tree = [array, alias, array]
    specs = [P("a"), P("a"), P(None, "a")]
    for result in mw.reshard(tree, mesh(range(4)), specs, donate=True):
        assert_is(result, values)


def test_a_result_that_lives_on_in_donated_memory_is_whole():
    values = pattern((8, 8))
    array = on(values, mesh(range(8)))
    result = mw.reshard(array, mesh(range(4)), P(), donate=True)
    assert_is(result, values, mesh(range(4)), P())
    renamed = mw.reshard(result, mesh(range(4), names="z"), P(), donate=True)
    assert_is(renamed, values)


MEMORY = """
import json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import meshwright as mw

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
devices = np.array(jax.devices())
status = pathlib.Path("/proc/self/status")

def resident(field):
    return next(int(x.split()[1]) for x in status.read_text().splitlines() if field in x) / 1024

def tree():
    fill = jax.jit(lambda n: jnp.full((1024, 4096), n), out_shardings=NamedSharding(eight, P("a")))
    return jax.block_until_ready([fill(jnp.float32(n)) for n in range(12)])

eight, four = Mesh(devices, ("a",)), Mesh(devices[:4], ("b",))
mw.reshard(tree()[:1], four, P(None, "b"))
found = {}
for donate in (True, False):
    arrays = tree()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = mw.reshard(arrays, four, P(None, "b"), donate=donate)
    found["peak", donate] = resident("VmHWM") - before
    found["after", donate] = resident("VmRSS") - before
    assert [float(x[5, 5]) for x in result] == list(range(12))
    del arrays, result
print(json.dumps([found["peak", True], found["after", True], found["after", False]]))
"""


@needs_clear_refs
def test_memory_stays_bounded():
    """12 arrays of 16 MiB: little more than one exists twice, and no host copy is kept."""
    peak, after, after_copying = run_script(MEMORY)
    assert peak < 2 * 16
    assert after < 16
    assert after_copying < 12 * 16 + 16


def test_devices_that_are_not_cpus_keep_no_host_copy(monkeypatch):
    monkeypatch.setattr(moves, "platform", lambda sharding: "other")
    values = pattern((1024, 640))
    array = on(values, mesh(range(8)), P("a"))
    asked = []
    make = jax.make_array_from_single_device_arrays
    monkeypatch.setattr(
        jax,
        "make_array_from_single_device_arrays",
        lambda *args, **options: asked.append(make(*args, **options)) or asked[-1],
    )
    assert_is(mw.reshard(array, mesh(range(3)), P()), values)
    assert {id(part) for part in asked}.isdisjoint(id(s.data) for s in array.addressable_shards)
    assert len(asked) == 8


def test_small_arrays_go_together_and_large_ones_alone():
    at = mesh(range(2))

    def move(mib):
        return moves.Move("x", (mib << 20,), np.dtype("int8"), None, None, NamedSharding(at, P()))

    def sizes(*mibs):
        return [[m.bytes >> 20 for m in batch] for batch in resharding.batches([*map(move, mibs)])]

    assert sizes(1, 2, 1, 1, 3) == [[1, 2, 1], [1, 3]]
    assert sizes(100, 1, 1, 60, 40, 40) == [[100], [1, 1, 60], [40], [40]]
    assert sizes(16, 8, 8, 1) == [[16], [8, 8], [1]]
    assert sizes() == []


X = np.ones((8, 6), np.float32)


def deleted():
    array = jnp.ones((8, 6))
    array.delete()
    return array


@pytest.mark.parametrize(
    ("tree", "specs", "match"),
    [
        ({"w": X}, {"v": P()}, r"specs: the tree differs .* 'w' has no spec"),
        ({"w": X}, {"w": P(), "v": P()}, r"'v' has a spec but is not in the tree"),
        ({"w": X}, {"w": None}, r"\n  specs: 1 problem\.\n  w: None is not a PartitionSpec"),
        ({"w": X}, {"w": ("a",)}, r"w: \('a',\) is not a PartitionSpec\. Write P\('a'\)"),
        (
            {"w": X.astype(">f4")},
            P("a"),
            r"w: >f4 is in another byte order\. .*astype\('float32'\)",
        ),
        ([X, X], [P()], r"First difference: '1' has no spec"),
        ({"w": X}, P("z"), r"w: dim 0: no mesh axis 'z' in a, b\."),
        ({"w": X}, P(None, "a"), r"w: dim 1 has size 6, not divisible by 4 \(axes a\)"),
        ({"w": X}, P("b", "b"), r"w: .* uses axis 'b' twice"),
        ({"w": X}, P(None, None, "a"), r"w: .* has 3 entries for an array with 2 dims"),
        ({"w": X}, P(P.UNCONSTRAINED), r"w: .* leaves a dim open\. Say how to split it"),
        ({"w": X}, P(unreduced={"a"}), r"w: .* asks for more than a split"),
        ({"w": deleted()}, P("a"), r"w: the array was deleted or donated\. Use the one it went"),
        ({"w": jax.ShapeDtypeStruct((8, 6), "float32")}, P("a"), r"w: a shape without values"),
        ({"w": X.astype("float64")}, P("a"), r"w: float64 would become float32\. Convert it"),
        ({"w": np.array(["a"])}, P(), r"w: <U1 is no dtype that a device can hold"),
        ({"w": np.zeros(2, jax.dtypes.float0)}, P(), r"w: .*float0.* is no dtype that a device"),
        (
            {"w": mw.FromCallback((8, 6), np.dtype("float32"), lambda index: X[index])},
            P("a"),
            r"w: <FromCallback.* holds no values yet\. Place it with shard",
        ),
        (deleted(), P("a"), r"\(the array\): the array was deleted"),
    ],
)
def test_bad_input_is_refused(tree, specs, match):
    with pytest.raises(PartitionError, match=r"^reshard: 1 problem, nothing was placed\.") as error:
        mw.reshard(tree, mesh(range(8), 4, 2), specs)
    with pytest.raises(PartitionError, match=match):
        raise error.value


def test_donate_is_true_or_false():
    with pytest.raises(mw.errors.MeshwrightError, match=r"^donate: 'yes' is not True or False\.$"):
        mw.reshard(X, mesh(range(8), 4, 2), P(), donate="yes")


def test_a_donated_array_that_lies_in_place_or_is_shared_is_not_deleted():
    at = mesh(range(8), 4, 2)
    in_place = on(X, at, P("a"))
    kept = mw.reshard(in_place, at, P("a"), donate=True)
    assert not in_place.is_deleted() and not kept.is_deleted()


def test_all_problems_are_named_at_once():
    tree = {"a": deleted(), "b": X, "c": X.astype("float64")}
    specs = {"a": P("z"), "b": P(None, "a"), "c": P()}
    with pytest.raises(PartitionError, match="4 problems") as error:
        mw.reshard(tree, mesh(range(8), 4, 2), specs)
    lines = str(error.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["a", "a", "b", "c"]


def test_tracers_are_sent_to_the_right_function():
    match = r"w: a tracer\. Under jit use jax.lax.with_sharding_constraint or jax.sharding.reshard"
    with pytest.raises(PartitionError, match=match):
        jax.jit(lambda w: mw.reshard({"w": w}, mesh(range(4)), P("a")))(X)


def test_meshes_without_devices_are_refused(monkeypatch):
    with pytest.raises(PartitionError, match=r"mesh: an AbstractMesh .* has no devices"):
        mw.reshard(X, AbstractMesh((4,), ("a",), axis_types=(AxisType.Auto,)), P("a"))
    with pytest.raises(PartitionError, match=r"mesh: 3 is not a jax.sharding.Mesh"):
        mw.reshard(X, 3, P("a"))
    monkeypatch.setattr(_compat, "is_compile_only", lambda device: True)
    with pytest.raises(PartitionError, match="its devices exist only for the compiler"):
        mw.reshard(X, mesh(range(4)), P("a"))


def test_an_open_sum_is_refused():
    at = mesh(range(2), types=AxisType.Explicit)
    with jax.set_mesh(at):
        array = jax.device_put(np.ones((2, 4), np.float32), NamedSharding(at, P("a")))
        summed = jax.jit(lambda x: jnp.einsum("ab->b", x, out_sharding=P(unreduced={"a"})))(array)
        with pytest.raises(PartitionError, match=r"\(the array\): an unreduced array"):
            mw.reshard(summed, mesh((3,)), P())


FIRST, LAST = range(4), range(4, 8)


@pytest.mark.parametrize(
    ("source", "source_spec", "target", "spec", "crossing_bytes"),
    [
        (FIRST, P("a"), LAST, P(), {(0, 1): 256}),
        (FIRST, P("a"), LAST, P(None, "a"), {(0, 1): 256}),
        (range(8), P("a"), LAST, P("a"), {(0, 1): 128}),
        (FIRST, P("a"), range(8), P("a"), {(0, 1): 128}),
        (range(8), P(), LAST, P("a"), {}),
        ((0, 4), P("a"), (5, 1), P("a"), {(0, 1): 128, (1, 0): 128}),
    ],
)
def test_a_piece_crosses_once_and_only_to_who_lacks_it(
    monkeypatch, source, source_spec, target, spec, crossing_bytes
):
    """Two processes of four devices, as the plan sees them."""
    ends = NamedSharding(mesh(source), source_spec), NamedSharding(mesh(target), spec)
    monkeypatch.setattr(message_plan, "process_of", lambda device: device.id // 4)
    message_plan.find_needs.cache_clear()
    move = moves.Move("x", (8, 8), np.dtype("float32"), None, *ends)
    messages = message_plan.plan_messages([move])
    message_plan.find_needs.cache_clear()
    assert {pair: sum(p.bytes for p in pieces) for pair, pieces in messages.items()} == (
        crossing_bytes
    )


def test_holders_share_the_sending(monkeypatch):
    ends = NamedSharding(mesh(range(6)), P()), NamedSharding(mesh((6, 7)), P())
    monkeypatch.setattr(message_plan, "process_of", lambda device: device.id // 2)
    message_plan.find_needs.cache_clear()
    messages = message_plan.plan_messages(
        [moves.Move("x", (8,), np.dtype("int8"), None, *ends) for _ in range(6)]
    )
    message_plan.find_needs.cache_clear()
    assert {pair: len(pieces) for pair, pieces in messages.items()} == {
        (0, 3): 2,
        (1, 3): 2,
        (2, 3): 2,
    }


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] != pair[1]),
        st.integers(1, 9),
    )
)
@settings(derandomize=True, deadline=None)
def test_in_a_round_nobody_sends_or_receives_twice(sizes):
    rounds = ppermute_transport.rounds(sizes)
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(sizes)
    for pairs in rounds:
        assert len({sender for sender, _ in pairs}) == len(pairs)
        assert len({receiver for _, receiver in pairs}) == len(pairs)


@given(st.integers(1, 2**34), st.integers(1, 8))
@settings(derandomize=True, deadline=None)
def test_rows_are_whole_blocks_little_larger_than_needed(size, width):
    row = ppermute_transport.row_bytes(size, width)
    assert row % 4096 == 0
    assert row * width <= 1.2 * ppermute_transport._CHUNK
    assert row <= max(4096, 1.13 * -(-size // width) + 4096)


class Service:
    """The coordination service's store, alone in the world."""

    def __init__(self):
        self.stored = {}

    def key_value_set(self, key, value):
        assert key not in self.stored
        self.stored[key] = value

    def key_value_delete(self, prefix):
        self.stored = {k: v for k, v in self.stored.items() if not k.startswith(prefix)}

    def blocking_key_value_get(self, key, timeout):
        if key not in self.stored:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.stored[key]


@pytest.fixture
def service(monkeypatch):
    store = Service()
    monkeypatch.setattr(_compat, "coordination_client", lambda: store)
    monkeypatch.setattr(_compat, "coordination_place", lambda: (0, 2))
    return store


def test_a_process_that_does_not_call_is_named(service):
    expected = ["process 1 did not call it within 600 s. Every process must, also one that holds"]
    found = moves.agree([], [])
    assert [problem[: len(expected[0])] for problem in found] == expected


def test_without_the_first_process_nobody_goes_ahead(service, monkeypatch):
    monkeypatch.setattr(_compat, "coordination_place", lambda: (1, 2))
    assert moves.agree(["w: bad"], []) == ["process 0 did not call reshard, or left."]


def test_notes_of_earlier_calls_are_cleared(service):
    for _ in range(5):
        moves.agree([], [])
    # Those of the last call, and of the one before it, which others may still be reading.
    assert len({key.split("/")[2] for key in service.stored}) == 2


def test_without_a_service_a_process_speaks_for_itself(monkeypatch):
    monkeypatch.setattr(_compat, "coordination_client", lambda: None)
    assert moves.agree(["w: bad"], []) == ["w: bad"]


def test_the_service_is_absent_in_a_single_process():
    assert _compat.coordination_client() is None


@pytest.mark.compilers
@pytest.mark.parametrize(
    ("name", "options"),
    [("v5e:4x4", {}), ("v5p:2x2x4", {}), ("v6e:4x4", {}), ("v5e:4x4", {"num_slices": 2})],
)
def test_tpus_compile_the_program_that_carries_bytes(name, options):
    devices = tuple(_compat.compile_only_devices("tpu", name, **options))
    program = ppermute_transport.shift_program(devices, ((0, 3), (1, 0)))
    network = ppermute_transport.make_network(devices)
    rows = NamedSharding(network.mesh, P("device"))
    shape = jax.ShapeDtypeStruct((8 * network.mesh.size, 128), "uint32", sharding=rows)
    compiled = program.lower(shape).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 4096
    assert any(word in compiled.as_text() for word in ("collective-permute", "send("))


def test_single_device_shardings_are_sources_too():
    values = pattern((6, 4))
    array = jax.device_put(values, SingleDeviceSharding(jax.devices()[5]))
    assert_is(mw.reshard(array, mesh((5,)), P()), values, mesh((5,)), P())
