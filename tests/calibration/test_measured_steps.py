"""`measure`: the trace joined with the program, who is late, steps in all idioms, bad input."""

import functools
import itertools
import json

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.calibration.trace import record
from meshwright.errors import CalibrationError
from meshwright.hlo.program import read_program
from meshwright.rehearsal.kernels import kernels, running

P = PartitionSpec


def put(mesh, shape, *spec):
    return jax.device_put(jnp.full(shape, 0.01), NamedSharding(mesh, P(*spec)))


def loss(weights, x):
    hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w[0]) @ w[1], None), x, weights)
    return jnp.mean(hidden**2)


def train_step(weights, x):
    value, grads = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


@functools.cache
def layers():
    """Four scanned layers on a mesh of two axes: weights and rows."""
    mesh = mw.mesh("fsdp:4, tp:2")
    weights = (put(mesh, (4, 64, 128), None, "fsdp", "tp"), put(mesh, (4, 128, 64), None, "tp"))
    return weights, put(mesh, (32, 64), "fsdp")


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def test_every_kernel_and_collective_is_in_the_trace_on_every_device_as_often_as_it_runs():
    weights, x = layers()
    compiled = jax.jit(train_step).lower(weights, x).compile()
    jax.block_until_ready(compiled(weights, x))
    with record() as recording:
        for _ in range(3):
            jax.block_until_ready(compiled(weights, x))
    program = read_program(compiled.as_text())
    runs = {}
    for event in recording.trace.of("jit_train_step"):
        runs.setdefault(event.instruction, [0] * 8)[event.device] += 1
    conditions = {
        name
        for computation in program.computations.values()
        for instruction in computation.instructions
        for how, name in instruction.called
        if how == "condition"
    }
    checked = 0
    for computation in running(program):
        times = program.run_count(computation.name).count
        if computation.name in conditions:  # of counted loops, which need not ask
            continue
        collectives = [i for i in computation.instructions if i.opcode.startswith("all-")]
        for name in [k.name for k in kernels(program, computation)] + [i.name for i in collectives]:
            assert runs.get(name) == [3 * times] * 8, name
            checked += times > 1
    assert checked > 10  # many of them inside of the loops


def test_a_step_that_donates_is_measured_and_shows_itself(tmp_path):
    weights, x = layers()
    step = jax.jit(train_step, donate_argnums=0)
    given = copied(weights)
    r = mw.rehearse(train_step, weights, x, mesh=x.sharding.mesh, donate_argnums=0)
    m = mw.measure(step, given, x, rehearsal=r, steps=3)
    assert given[0].is_deleted() and not x.is_deleted()
    # Two to warm up, three rounds of three, three under the profiler.
    plain, expected = jax.jit(train_step), weights
    for _ in range(14):
        expected, value = plain(expected, x)
    after, last = m.results
    assert jnp.allclose(last, value, rtol=1e-5) and jnp.allclose(after[0], expected[0], rtol=1e-5)

    assert m.silent == () and m.unknown == {}
    assert [kernel for kernel in m.kernels if kernel.runs != kernel.expected] == [
        kernel for kernel in m.kernels if kernel.in_condition
    ]
    assert [entry.runs for entry in m.collectives] == [entry.times.count for entry in r.collectives]
    assert all(entry.measured >= entry.moving > 0 for entry in m.collectives)
    assert all(0 < entry.exposed <= entry.measured * 1.001 for entry in m.collectives)
    assert [device.position for device in m.devices] == list(range(8))

    text = str(m)
    for words in (
        "matrix products",
        "exposed communication",
        "test_measured_steps.py:",
        "rehearsed",
    ):
        assert words in text
    data = json.loads(json.dumps(m.to_json()))
    assert data["rehearsed"]["seconds"] == r.time.total
    assert m.save(tmp_path / "m.html").read_text().count("<svg") == 2  # two bars
    assert json.loads(m.save(tmp_path / "m.json").read_text()) == data
    assert r.compare(m) is not None and "rehearsed" in str(r.compare(m))


def test_the_device_that_the_others_wait_for_is_named():
    mesh = mw.mesh("dp:8")

    def body(x):
        def work(x):
            return jax.lax.fori_loop(0, 1500, lambda _, y: jnp.tanh(y @ y), x)

        x = jax.lax.cond(jax.lax.axis_index("dp") == 5, work, lambda x: x, x)
        return jax.lax.psum(x, "dp")

    step = jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P(), check_vma=False)
    m = mw.measure(jax.jit(step), put(mesh, (8 * 128, 128), "dp"), steps=3)
    assert m.late is not None and m.late.name == "cpu:5"
    assert m.collectives[0].late == "cpu:5"
    assert m.collectives[0].waiting > m.collectives[0].moving
    assert "cpu:5 (process 0) is late" in str(m)


def test_steps_of_nnx_and_equinox_and_partials():
    mesh = mw.mesh("dp:8")
    x = put(mesh, (16, 8), "dp")
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    @nnx.jit
    def update(model, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model), nnx.state(grads)))

    before = jnp.copy(model.kernel[...])
    assert "update" in repr(mw.measure(update, model, x, mesh=mesh, steps=1))
    assert not jnp.allclose(before, model.kernel[...])

    module = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    forward = eqx.filter_jit(lambda module, x: jax.vmap(module)(x))
    assert mw.measure(forward, module, x, mesh=mesh, steps=1).results.shape == (16, 8)

    named = jax.jit(lambda x, by: by * x, static_argnames="by")
    assert mw.measure(functools.partial(named, by=3), x, steps=1).results.shape == (16, 8)
    scaled = functools.partial(jax.jit(lambda by, x: by * x), 2.0)
    assert float(mw.measure(scaled, x, steps=1).results[0, 0]) == pytest.approx(0.02)


def test_the_second_program_is_measured_where_the_first_step_gives_other_shardings():
    mesh = mw.mesh("dp:8")

    def step(state, x):
        return jax.lax.with_sharding_constraint(state + x.sum(), NamedSharding(mesh, P("dp"))), 0

    state = put(mesh, (64, 8))
    m = mw.measure(jax.jit(step, donate_argnums=0), state, put(mesh, (8,), "dp"), steps=1)
    assert "compiles it twice" in "\n".join(m.notes)
    assert m.results[0].sharding.spec == P("dp")


def by_in_shardings(sharding):
    return jax.jit(lambda x: x + 1, in_shardings=sharding), np.ones((64, 64), "float32")


def by_shard_map(sharding):
    options = {"in_specs": sharding.spec, "out_specs": sharding.spec}
    return jax.jit(jax.shard_map(jnp.sin, mesh=sharding.mesh, **options)), jnp.ones((64, 64))


def by_constraint(sharding):
    def step(x):
        return jax.lax.with_sharding_constraint(x, sharding).sum()

    return jax.jit(step), jnp.ones((64, 64))


def by_out_shardings(sharding):
    return (jax.jit(lambda: jnp.sin(jnp.arange(4096.0)), out_shardings=sharding),)


def by_unused(sharding):
    return jax.jit(lambda x, unused: x + 1), np.ones(4), jax.device_put(jnp.ones(64), sharding)


@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        (by_in_shardings, "fsdp:4"),
        (by_shard_map, "fsdp:4"),
        (by_constraint, "fsdp:4"),
        (by_out_shardings, "fsdp:4"),
        (by_unused, "devices:1"),
    ],
)
def test_the_program_says_its_mesh_where_the_arguments_do_not(make, mesh):
    sharding = NamedSharding(mw.mesh("fsdp:4", devices=jax.devices()[:4]), P("fsdp"))
    m = mw.measure(*make(sharding), steps=1)
    assert m.mesh == mesh and len(m.devices) == int(mesh[-1])
    assert all(kernel.runs == kernel.expected for kernel in m.kernels)


def test_a_given_mesh_names_the_axes_if_it_has_the_devices_in_their_order():
    own = mw.mesh("fsdp:8")
    x = put(own, (64, 64), "fsdp")
    step = jax.jit(lambda x: x.sum(0))
    named = jax.sharding.Mesh(own.devices.reshape(2, 4), ("a", "b"))
    m = mw.measure(step, x, mesh=named, steps=1)
    assert m.mesh == "a:2, b:4" and m.collectives[0].collective.over == "a, b"
    turned = jax.sharding.Mesh(own.devices[::-1], ("fsdp",))
    with pytest.raises(CalibrationError, match=r"in another order than the step's own mesh, \{'fs"):
        mw.measure(step, x, mesh=turned)


class Trainer:
    @functools.partial(jax.jit, static_argnums=0)
    def step(self, x):
        return x + 1


def test_a_jitted_method_is_measured_and_a_bare_function_says_that_it_is_jitted():
    m = mw.measure(Trainer().step, jnp.ones(3), steps=1)
    assert m.name == "step" and "jitted" not in "".join(m.notes)
    assert mw.measure(Trainer().step, x := jnp.ones(3), steps=1).results.shape == x.shape
    bare = mw.measure(lambda x: x + 1, jnp.ones(3), steps=1)
    assert bare.notes[0] == "The step is not jitted; it ran as jax.jit(step), without donation."


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_array_that_no_result_replaces_is_noted():
    m = mw.measure(jax.jit(lambda x: x[:-1], donate_argnums=0), jnp.ones(9), steps=1)
    assert m.notes[0].startswith("x is donated, but no result has its shapes to take its place")


def cells(shown, column):
    """The rows of the first table of a text: names, and what stands in a column."""
    heading, *rows = str(shown).splitlines()[1:]
    end = heading.index(column) + len(column)
    rows = itertools.takewhile(lambda line: not line.startswith("kernels that"), rows)
    return {line[:22].strip(): line[end - 9 : end].strip() for line in rows}


def test_a_rehearsal_of_another_program_is_named_and_its_column_adds_up():
    mesh = mw.mesh("fsdp:8")
    x = put(mesh, (64, 64), "fsdp")
    m = mw.measure(jax.jit(jnp.sin), x, steps=1)
    other = mw.rehearse(lambda a: jnp.sort(a @ a, 0), x, mesh=mesh, name="other")
    beside = other.compare(m)
    words = "Rehearsed was other as fsdp:8 on cpu:8; sin ran as fsdp:8 on cpu:8."
    assert beside.notes[-1] == words and words not in m.notes
    shown = cells(beside, "rehearsed")
    assert {"matrix products", "sorts", "exposed communication"} <= set(shown)
    units = {"us": 1e-6, "ms": 1e-3, "": 0.0}
    seconds = {
        name: float(number) * units[unit]
        for name, text in shown.items()
        for number, _, unit in [(text or "0").partition(" ")]
    }
    total = seconds.pop("a step")
    seconds.pop("hidden communication")
    assert sum(seconds.values()) == pytest.approx(total, rel=0.02)
    # The next one takes its place, note and all.
    own = mw.rehearse(jnp.sin, x, mesh=mesh)
    assert own.compare(beside).notes == m.notes
    assert beside.to_json()["rehearsed"]["name"] == "other"


@pytest.mark.parametrize(
    ("shape", "mesh", "words"),
    [
        ((128, 64), "fsdp:8", r"float32\[128,64\] there, float32\[64,64\] here\. Rehearse"),
        ((64, 64), "fsdp:4", r"^rehearsal: of sin as fsdp:4 on cpu:4, 4 devices, and the step"),
    ],
)
def test_a_rehearsal_of_other_sizes_is_refused(shape, mesh, words):
    x = put(mw.mesh("fsdp:8"), (64, 64), "fsdp")
    shapes = jax.ShapeDtypeStruct(shape, "float32")
    other = mw.rehearse(jnp.sin, shapes, mesh=mesh, on=f"cpu:{mesh[-1]}")
    with pytest.raises(CalibrationError, match=words):
        mw.measure(jnp.sin, x, rehearsal=other)
    with pytest.raises(CalibrationError, match=words):
        other.compare(mw.measure(jnp.sin, x, steps=1))


def pipelined():
    return mw.pipeline(loss, mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp"), microbatches=2)


BAD = [
    (lambda: mw.measure(3), "cannot be called"),
    (lambda: mw.measure(pipelined()), "pass its arguments"),
    (
        lambda: mw.measure(jax.jit(lambda x, n: x * n, static_argnums=1), jnp.ones(4), 3),
        "static_argnames",
    ),
    (lambda: mw.measure(jnp.sin, jnp.ones(3), steps=0), "from 1 on"),
    (lambda: mw.measure(jnp.sin, jnp.ones(3), rehearsal="r"), "not what rehearse returns"),
    (lambda: mw.measure(jnp.sin, jax.ShapeDtypeStruct((3,), "f4")), "mw.rehearse(step"),
    (lambda: mw.measure(jnp.sin, jnp.ones(3), mesh="dp:8"), "jax.sharding.Mesh"),
    (lambda: mw.measure(jnp.sin, jnp.ones(3), trace=__file__), "is a file"),
    (
        lambda: mw.measure(jax.jit(lambda x: {"x": x + 1}, donate_argnums=0), jnp.ones(3)),
        "no result of the step has its structure",
    ),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input_is_told(call, words):
    with pytest.raises(CalibrationError) as caught:
        call()
    assert words in str(caught.value) and len(str(caught.value)) < 400


def test_a_profiler_that_runs_and_a_step_that_fails(tmp_path):
    with jax.profiler.trace(tmp_path), pytest.raises(CalibrationError, match="running already"):
        mw.measure(jnp.sin, jnp.ones(3), steps=1)

    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mw.measure(fails, jnp.ones(3))
    # The profiler was left alone, and no files of ours are there.
    kept = mw.measure(jnp.sin, jnp.ones(3), steps=1, trace=tmp_path / "kept")
    assert list((tmp_path / "kept").rglob("*.xplane.pb")) and kept.seconds > 0
