"""Links inside one process move arrays bit for bit, by any key; what is wrong is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import _compat
from meshwright.errors import TransferError
from meshwright.transfers import connection, links

DTYPES = (
    *("bool", "int4", "uint4", "int8", "uint16", "float16", "bfloat16", "float32"),
    *("float8_e4m3fn", "float8_e5m2", "complex64", "int64", "float64"),
)
SHAPE = (8, 16)
WHOLE = P()


def mesh(places, *sizes, names="ab"):
    devices = np.array(jax.devices())[list(places)].reshape(sizes or -1)
    return Mesh(devices, tuple(names[: devices.ndim]))


def end(places, *sizes, spec=WHOLE):
    return NamedSharding(mesh(places, *sizes), spec)


FIRST, LAST = end(range(4), spec=P("a")), end(range(4, 8), spec=P(None, "a"))


def pattern(shape=SHAPE, dtype="float32", seed=0):
    """Any bits the dtype knows: NaNs of all kinds, negative zeros, subnormals."""
    draw = np.random.default_rng(seed)
    if dtype in ("int4", "uint4"):
        low = -8 if dtype == "int4" else 0
        return draw.integers(low, low + 16, shape).astype(np.int8).astype(jnp.dtype(dtype))
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    raw = draw.bytes(math.prod(shape) * jnp.dtype(dtype).itemsize)
    return np.frombuffer(raw, jnp.dtype(dtype)).reshape(shape)


def on(values, sharding):
    with jax.enable_x64(True):
        return jax.make_array_from_callback(
            values.shape, sharding, lambda index: values[index], dtype=values.dtype
        )


def assert_is(array, values, sharding):
    """Every shard holds exactly these bits, and lies where it shall."""
    assert array.dtype == values.dtype
    assert array.sharding == sharding
    assert [shard.device for shard in array.addressable_shards] == list(sharding.mesh.devices.flat)
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


@pytest.fixture
def link():
    with mw.transfers.connect() as one:
        yield one


@st.composite
def ends(draw):
    places = draw(st.permutations(range(8)))
    sizes = draw(st.sampled_from([(1,), (2,), (4,), (8,), (2, 2), (2, 4)]))
    at = mesh(places[: math.prod(sizes)], *sizes)
    return NamedSharding(at, P(*draw(st.permutations([*at.axis_names, None]))[:2]))


@settings(max_examples=25, deadline=None)
@given(
    source=ends(),
    target=ends(),
    dtype=st.sampled_from(DTYPES),
    transport=st.sampled_from(["local", "put"]),
)
def test_any_split_goes_to_any_other_bit_for_bit(source, target, dtype, transport):
    values = pattern(dtype=dtype)
    array = on(values, source)
    with mw.transfers.connect(transport=transport) as link:
        assert_is(link.move(mw.transfers.route(array, target), 0, array), values, target)
    assert_is(array, values, source)


def test_all_dtypes_keys_scalars_and_empty_arrays_travel_in_one_tree(link):
    values = {dtype: pattern(dtype=dtype) for dtype in DTYPES}
    values |= {"empty": np.zeros((0, 4), np.float32), "none": np.zeros((4, 0), np.int8)}
    tree = {name: on(value, FIRST) for name, value in values.items() if name != "empty"}
    tree["empty"] = on(values["empty"], FIRST)
    key = jax.random.split(jax.random.key(1, impl="rbg"), 8)
    tree |= {"key": jax.device_put(key, FIRST), "scalar": on(np.float32(-0.0), end(range(4)))}
    targets = dict.fromkeys(values, LAST) | {"none": end(range(4, 8)), "scalar": end(range(4, 8))}
    targets["key"] = end((6, 7), spec=P("a"))
    route = mw.transfers.route(tree, targets)
    for _ in range(2):
        moved = link.move(route, 0, tree)
        for name, value in values.items():
            assert_is(moved[name], value, targets[name])
        assert_is(moved["scalar"], np.float32(-0.0).reshape(()), targets["scalar"])
        assert jax.random.key_impl(moved["key"]) == jax.random.key_impl(key)
        assert (jax.random.key_data(moved["key"]) == jax.random.key_data(key)).all()
        assert moved["key"].sharding.is_equivalent_to(targets["key"], 1)


def test_sends_and_receives_meet_by_key_in_any_order(link):
    values = [pattern(seed=seed) for seed in range(6)]
    route = mw.transfers.route(on(values[0], FIRST), LAST)
    for number in range(3):
        link.send(route, ("a", number), on(values[number], FIRST))
        link.send(route, 7, on(values[3 + number], FIRST))
    for number in (2, 0, 1):
        assert_is(link.receive(route, ("a", number)), values[number], LAST)
        with pytest.raises(TransferError, match="this process has not sent it yet"):
            link.receive(route, ("a", number))
    for number in range(3):
        assert_is(link.receive(route, np.int64(7)), values[3 + number], LAST)


def test_a_receive_that_was_refused_does_not_count(link):
    values = pattern()
    route = mw.transfers.route(on(values, FIRST), LAST)
    for _ in range(3):
        with pytest.raises(TransferError, match="Inside a process send first, or move"):
            link.receive(route, 0)
    link.send(route, 0, on(values, FIRST))
    assert_is(link.receive(route, 0), values, LAST)


def test_a_mesh_that_is_set_changes_nothing(link):
    values = pattern()
    route = mw.transfers.route(on(values, FIRST), LAST)
    with jax.set_mesh(mesh(range(8), 2, 4)):
        assert_is(link.move(route, 0, on(values, FIRST)), values, LAST)


def test_moving_does_not_wait_for_the_source(link):
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.sin(y @ y), x)

    array = jax.device_put(jnp.eye(512), end((0,)))
    targets = [end((1,)), end((2, 3), spec=P(None, "a"))]
    made = [mw.transfers.route(array, target) for target in targets]
    for route in made:  # compile
        link.move(route, 0, slow(array)).block_until_ready()
    late = slow(array)
    moved = [link.move(route, 0, late) for route in made]
    assert not late.is_ready()
    for result, target in zip(moved, targets, strict=True):
        assert_is(result, np.asarray(late), target)


def test_donated_arrays_are_given_up_unless_shared(link):
    values = pattern()
    for target in (LAST, end((0, 4), spec=P("a")), end(range(4, 8), spec=P("a"))):
        array = on(values, FIRST)
        moved = link.move(mw.transfers.route(array, target), 0, array, donate=True)
        assert array.is_deleted()
        assert_is(moved, values, target)
    array = on(values, FIRST)
    shared = link.move(
        mw.transfers.route(array, end(range(4), spec=P("a", None))), 0, array, donate=True
    )
    assert_is(shared, values, end(range(4), spec=P("a", None)))
    assert not array.is_deleted()


def test_one_process_needs_no_port():
    link = mw.transfers.connect()
    assert (link.transport, link.processes) == ("local", (0,))
    assert repr(link) == "<Link 'local' of processes 0>"
    assert not hasattr(link, "address")


def test_a_closed_link_says_so_and_forgets_what_was_sent(link):
    array = on(pattern(), FIRST)
    route = mw.transfers.route(array, LAST)
    link.send(route, 0, array)
    link.close()
    link.close()
    assert repr(link) == "<Link 'local' of processes 0, closed>"
    assert link._kept == {}
    for use in (
        lambda: link.send(route, 0, array),
        lambda: link.receive(route, 0),
        lambda: link.move(route, 0, array),
    ):
        with pytest.raises(TransferError, match=r"this link is closed. Make another with"):
            use()


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (lambda: {"x": pattern()}, "x: array.* is not a jax.Array"),
        (lambda: {"x": on(pattern((8, 8)), FIRST)}, r"x: float32\[8, 8\], the route carries"),
        (lambda: {"x": on(pattern(dtype="int8"), FIRST)}, r"x: int8\[8, 16\], the route carries"),
        (lambda: {"x": on(pattern(), LAST)}, "x: is sharded as NamedSharding.*the route starts at"),
        (lambda: {"x": jax.random.split(jax.random.key(0), 8)}, "x: key.*the route carries"),
        (lambda: {"y": on(pattern(), FIRST)}, "is not that of the route"),
        (lambda: None, "is not that of the route"),
    ],
)
def test_other_arrays_than_the_routes_are_refused(link, arrays, text):
    route = mw.transfers.route({"x": on(pattern(), FIRST)}, LAST)
    with pytest.raises(TransferError, match=text):
        link.move(route, 0, arrays())


def test_deleted_arrays_and_tracers_are_refused(link):
    array = on(pattern(), FIRST)
    route = mw.transfers.route(array, LAST)
    with pytest.raises(TransferError, match=r"a tracer. Transfers happen outside jit"):
        jax.jit(lambda x: link.move(route, 0, x))(array)
    array.delete()
    with pytest.raises(TransferError, match="the array was deleted or donated"):
        link.move(route, 0, array)


def test_other_keys_than_the_routes_are_refused(link):
    key = jax.device_put(jax.random.split(jax.random.key(0), 8), FIRST)
    route = mw.transfers.route(key, end((5,)))
    other = jax.device_put(jax.random.split(jax.random.key(0, impl="rbg"), 8), FIRST)
    with pytest.raises(TransferError, match="other keys or another shape"):
        link.move(route, 0, other)
    with pytest.raises(TransferError, match="the route carries random keys"):
        link.move(route, 0, on(pattern((8,)), FIRST))


def test_an_equivalent_sharding_passes(link):
    values = pattern((8,))
    route = mw.transfers.route(on(values, end(range(4), spec=P("a"))), end((5,)))
    same = on(values, end(range(4), 4, 1, spec=P(("a", "b"))))
    assert_is(link.move(route, 0, same), values, end((5,)))


@pytest.mark.parametrize("key", [1.5, None, (1, 2.0), [1], object()])
def test_keys_that_processes_may_tell_apart_differently_are_refused(link, key):
    array = on(pattern(), FIRST)
    route = mw.transfers.route(array, LAST)
    with pytest.raises(TransferError, match="Use an int, a str or a tuple of them"):
        link.send(route, key, array)
    with pytest.raises(TransferError, match="Use an int, a str or a tuple of them"):
        link.move(route, key, array)


def test_numbers_are_63_bits_and_all_different():
    made = {
        links.message_number(name, links.key_text(key), turn, *pair)
        for name in ("a", "b")
        for key in (1, "1", (1,), (1, 1), 11)
        for turn in range(3)
        for pair in ((0, 1), (1, 0), (0, 11))
    }
    assert len(made) == 2 * 5 * 3 * 3
    assert all(0 <= number < 2**63 for number in made)
    assert links.message_number("a", "1", 0, 0, 1) == 8_019_859_571_376_092_054


def test_not_a_route_is_refused(link):
    with pytest.raises(TransferError, match=r"'x' is not a Route. Make one with"):
        link.move("x", 0, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"transport": "pul"},
            "transport 'pul': use one of auto, local, pull, put. Did you mean 'pull'?",
        ),
        ({"transport": 3}, "transport 3: use one of auto, local, pull, put."),
        ({"transport": "pull"}, "transport='pull' needs processes that know of one another"),
        ({"processes": [1]}, r"connect: processes \[1\]: use numbers from 0 to 0."),
        ({"processes": 4}, "connect: processes 4: use numbers from 0 to 0."),
        ({"processes": []}, "use numbers from 0 to 0."),
        ({"address": "localhost"}, "address 'localhost': not an IP address."),
        ({"address": "256.1.1.1"}, "address '256.1.1.1': not an IP address."),
        ({"address": "127.0.0.1:80"}, "not an IP address.*the port is chosen"),
        ({"address": None}, "address None: not an IP address."),
        ({"address": "0.0.0.0"}, "names no interface that others could reach"),  # noqa: S104
        ({"address": "::"}, "names no interface that others could reach"),
    ],
)
def test_a_link_that_cannot_be_made_is_refused(options, text):
    with pytest.raises(TransferError, match=text):
        mw.transfers.connect(**options)


def test_an_address_of_another_machine_is_refused_before_anything_listens():
    with pytest.raises(TransferError, match="this machine has no such interface"):
        connection.serve("192.0.2.1")


def test_puts_are_allowed_only_before_jax_starts():
    jax.devices()
    with pytest.raises(TransferError, match="JAX has already started its devices"):
        mw.transfers.allow_puts()
    with pytest.raises(TransferError, match="not an IP address"):
        mw.transfers.allow_puts("localhost")


def test_a_put_address_that_nobody_could_reach_is_seen(monkeypatch):
    monkeypatch.setattr(_compat, "cross_host_address", lambda: "127.0.0.1:0")
    assert "others cannot reach port 0" in connection.puts_problem()
    monkeypatch.setattr(_compat, "cross_host_address", lambda: "")
    assert connection.puts_problem() == "jax_cross_host_transfer_socket_address is not set"
    monkeypatch.setattr(_compat, "cross_host_address", lambda: "127.0.0.1:4444")
    assert connection.puts_problem() == ""


def test_a_call_that_waited_in_vain_is_not_counted(monkeypatch):
    """Else the late process would meet another call than the one it answers."""

    class Store(dict):
        def key_value_set(self, key, value, allow_overwrite=False):
            assert allow_overwrite or key not in self
            self[key] = value

        def key_value_delete(self, prefix):
            for key in [key for key in self if key.startswith(prefix)]:
                del self[key]

        def blocking_key_value_get(self, key, timeout):
            if key not in self:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self[key]

    store = Store()
    monkeypatch.setattr(_compat, "coordination_client", lambda: store)
    monkeypatch.setattr(_compat, "coordination_place", lambda: (0, 2))
    for _ in range(2):
        with pytest.raises(TransferError, match=r"process 1 did not connect within 0.1 s"):
            connection._gather_addresses((0, 1), "here:1", 0.1)
        assert store == {}
    store["meshwright/transfers/0,1/0/1"] = "there:2"
    assert connection._gather_addresses((0, 1), "here:1", 0.1) == {0: "here:1", 1: "there:2"}


def test_with_puts_only_move_is_offered():
    array = on(pattern(), FIRST)
    route = mw.transfers.route(array, LAST)
    with mw.transfers.connect(transport="put") as link:
        with pytest.raises(TransferError, match=r"send: with transport='put' .* Use move"):
            link.send(route, 0, array)
        with pytest.raises(TransferError, match=r"receive: with transport='put' .* Use move"):
            link.receive(route, 0)
        with pytest.raises(TransferError, match="donate=True with transport='put'"):
            link.move(route, 0, array, donate=True)


@pytest.mark.parametrize("timeout", ["x", None, -1, float("nan"), True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout):
    with pytest.raises(mw.errors.TransferError, match=r"timeout: .* is not a number of seconds"):
        mw.transfers.connect(timeout=timeout)
