"""Steps and options that cannot be planned for, each told with its place and the way out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError, PlanningError

W = jax.ShapeDtypeStruct((512, 512), "float32")
X = jax.ShapeDtypeStruct((64, 512), "float32")


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


plan = functools.partial(mw.plan, step, W, X, on="v5e:2x4")


def test_what_the_step_raises_comes_through_as_it_is():
    def broken(w, x):
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        mw.plan(broken, W, X, on="v5e:2x4")
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        mw.plan(lambda w, x: w @ x, W, X, on="v5e:2x4")


def asks_for_a_value(w, batch):
    return w if batch["x"].sum() > 0 else -w


@pytest.mark.parametrize(
    "function",
    [asks_for_a_value, jax.jit(asks_for_a_value), functools.partial(asks_for_a_value, W)],
)
def test_what_jax_says_of_a_trace_names_the_users_function_line_and_argument(function):
    args = (W, {"x": X}) if not isinstance(function, functools.partial) else ({"x": X},)
    told = r"function asks_for_a_value at .*test_planning_bad_input.*argument batch\['x'\]"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=told):
        mw.plan(function, *args, on="v5e:2x4")


def test_what_jax_says_of_a_loss_and_its_blocks_names_them():
    @mw.block
    def layer(w, x):
        return x @ w if x.sum() > 0 else x

    for loss, name in (
        (asks_for_a_value, "asks_for_a_value"),
        (lambda w, b: layer(w, b["x"]), "layer"),
    ):
        told = rf"function {name} at .*test_planning_bad_input"
        with pytest.raises(jax.errors.TracerBoolConversionError, match=told):
            mw.plan(loss, W, {"x": X}, on="v5e:2x4", optimizer=optax.sgd(0.1))


@pytest.mark.parametrize(
    "function, args, told",
    [
        ("not a step", (W,), r"'not a step' cannot be called"),
        (step, (), r"pass the step's arguments, or their shapes"),
        (lambda a, b: None, ("x", 3j * 0 == 0), r"none of the arguments \(a, b\) holds an array"),
        (step, (W, (x for x in [1])), r"x: a generator, which gives its values once.*next\(x\)"),
        (step, (W, iter([X])), r"x: a list_iterator, which gives its values once"),
        (lambda w: w * 2, (jax.ShapeDtypeStruct((), "float32"),), "can be sharded: none of its"),
    ],
)
def test_a_step_that_cannot_be_planned(function, args, told):
    with pytest.raises(PlanningError, match=told):
        mw.plan(function, *args, on="v5e:2x4")


@pytest.mark.parametrize(
    "option, value, told",
    [
        ("check", -1, r"check: -1"),
        ("memory", 0, r"memory: 0 is not a part of a device's memory"),
        ("memory", 1.5, r"memory: 1.5 is not"),
        ("memory", True, r"memory: True is not"),
        ("max_axes", 0, r"max_axes: 0"),
        ("compiler", "gcc", r"compiler: 'gcc' is neither 'vendor' nor 'cpu'"),
        ("donate_argnums", 7, r"donate_argnums.*7"),
        ("keep", ["batch"], r"keep: \['batch'\] is no mapping"),
        ("keep", {"bach": "dp"}, r"no group of dims 'bach'. Did you mean 'batch'\?"),
        ("keep", {"batch": "dp"}, r"say the mesh too: mesh='dp:-1"),
        ("keep", {3: "dp"}, r"keep: 3: 'dp' is no name of a group and name of an axis"),
        ("keep", {"batch": None}, r"keep: 'batch': None is no name of a group"),
        ("mesh", "dp:8:explicit", r"mesh: axis 'dp' is of type explicit"),
        ("mesh", "dp:1*8", r"a plan decides itself what crosses DCN.*mesh='dp:8'"),
    ],
)
def test_a_bad_option_is_named(option, value, told):
    with pytest.raises(MeshwrightError, match=told) as caught:
        plan(**{option: value})
    assert caught.value.option == option


def test_a_step_that_has_not_run_yet_is_refused():
    def rows(w, x):
        yield x @ w

    async def later(w, x):
        return x @ w

    with pytest.raises(PlanningError, match=r"rows returns a generator, which computes nothing"):
        mw.plan(rows, W, X, on="v5e:2x4")
    with pytest.raises(PlanningError, match=r"later returns a coroutine, which computes nothing"):
        mw.plan(later, W, X, on="v5e:2x4")


def test_a_step_whose_paths_are_alike_is_planned():
    found = mw.plan(
        lambda s, x: x @ s["a/b"] + x @ s["a"]["b"], {"a/b": W, "a": {"b": W}}, X, on="v5e:2x4"
    )
    assert found.in_specs[0]["a/b"] == found.in_specs[0]["a"]["b"]


def test_keep_is_for_dims_that_the_axis_divides():
    told = r"keep: dp:8 divides no dim of 'batch', which has 3\. Take another size for 'dp'"
    with pytest.raises(PlanningError, match=told):
        mw.plan(
            step, W, jax.ShapeDtypeStruct((3, 512), "float32"), on="v5e:2x4", mesh="dp:8",
            keep={"batch": "dp"},
        )  # fmt: skip


def test_what_is_kept_takes_its_axis_first():
    few = jax.ShapeDtypeStruct((8, 512), "float32")  # so few rows that weights are better cut
    free = mw.plan(step, W, few, on="v5e:2x4", mesh="dp:8")
    assert not free.axes or free.axes[0].shards[:1] != ("batch",)
    kept = mw.plan(step, W, few, on="v5e:2x4", mesh="dp:8", keep={"batch": "dp"})
    assert kept.axes[0].shards[0] == "batch"


def test_a_mesh_that_leaves_devices_idle_says_so():
    assert any(
        "The mesh has 4 devices of 8: 4 stay idle." in note for note in plan(mesh="dp:4").notes
    )


def test_keep_names_an_axis_of_the_mesh():
    with pytest.raises(PlanningError, match=r"the mesh fsdp:4, tp:2 has no axis 'fdsp'.*'fsdp'"):
        plan(mesh="fsdp:4, tp:2", keep={"batch": "fdsp"})


def test_a_mesh_that_does_not_match_the_devices():
    with pytest.raises(MeshwrightError, match=r"16.*8|8.*16"):
        plan(mesh="fsdp:4, tp:4")


def test_unknown_hardware_and_hardware_without_speeds():
    with pytest.raises(mw.errors.TopologyError, match="v5x"):
        mw.plan(step, W, X, on="v5x:2x4")
    known = mw.topology("v5e:2x4")
    unknown = dataclasses.replace(known, chip=dataclasses.replace(known.chip, tflops=0.0))
    with pytest.raises(PlanningError, match=r"v5e:2x4 has no speeds \(tflops\)"):
        mw.plan(step, W, X, on=unknown)


def test_a_batch_smaller_than_the_devices_says_what_it_is_cut_into():
    few = jax.ShapeDtypeStruct((4, 512), "float32")
    notes = " ".join(mw.plan(step, W, few, on="v5e:2x4").notes)
    assert "The batch has 4 rows for 8 devices and is " in notes
    assert "multiple of 8 rows" in notes


def test_a_prime_number_of_devices_says_what_repeats_work():
    found = mw.plan(step, W, X, on="h100:7")
    told = " ".join(found.notes)
    assert ":7 shards nothing: 7 devices at a time do the same work, since no dim is" in told
    assert found.in_specs == (jax.P(), jax.P())
    even = mw.plan(step, W, jax.ShapeDtypeStruct((7 * 2**16, 512), "float32"), on="h100:7")
    assert even.in_specs[1] != jax.P() and not even.notes


def test_one_device():
    found = mw.plan(step, W, X, on=jax.devices()[:1])
    assert found.mesh.size == 1
    w, x = jnp.eye(512), jnp.ones((64, 512))
    assert jnp.allclose(found.jit()(w, x), step(w, x), atol=1e-6)


def test_arrays_of_no_size():
    def empty(w, x, none):
        return step(w, x), none @ w, jnp.concatenate([none, x])

    none = jnp.zeros((0, 512))
    found = mw.plan(empty, jnp.eye(512), jnp.ones((64, 512)), none, mesh="fsdp:4, tp:2")
    got = found.jit()(jnp.eye(512), jnp.ones((64, 512)), none)
    assert got[1].shape == (0, 512) and got[2].shape == (64, 512)


def test_where_nothing_fits_the_nearest_is_returned_with_ways_out():
    model = mw.models.model("llama3-70b")
    found = mw.plan(model.train_step, model.shapes(), model.batch(64, 4096), on="v5e:4x4")
    assert not found.fits
    notes = " ".join(found.notes)
    assert "Nothing that was tried fits. This comes nearest: " in notes and "too much" in notes
    for way in ("donate the state", "moments in bfloat16", "chips in place of 16"):
        assert way in notes
    predicted = [each.predicted.bytes for each in found.alternatives]
    assert found.predicted.bytes == min(predicted)
    assert "Nothing that was tried fits" in str(found)


def test_a_batch_that_is_too_large_is_told_the_rows_that_fit():
    wide = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    rows = jax.ShapeDtypeStruct((2**21, 8192), "bfloat16")

    def deep(w, x):
        def cost(w):
            hidden = x
            for _ in range(4):
                hidden = jnp.tanh(hidden @ w)
            return jnp.mean(hidden.astype("float32") ** 2)

        return w - jax.grad(cost)(w)

    found = mw.plan(deep, wide, rows, on="v5e:2x4", donate_argnums=0)
    assert not found.fits
    notes = " ".join(found.notes)
    assert f"rows in place of {2**21}" in notes and "jax.checkpoint" in notes


@pytest.mark.slow
def test_ten_thousand_arrays():
    params = [W] * 10_000

    def many(params, x):
        return [w * 0.5 for w in params[:-1]] + [step(params[-1], x)]

    found = mw.plan(many, params, X, on="v5e:2x4", donate_argnums=0)
    assert len(found.in_specs[0]) == 10_000
    assert found.out_specs == found.in_specs[0]


@pytest.mark.slow
def test_nine_thousand_chips():
    model = mw.models.model("llama3-8b")
    args = model.shapes(), model.batch(18_432, 2048)
    found = mw.plan(model.train_step, *args, on="tpu7x:16x24x24", donate_argnums=0)
    assert found.topology.num_devices == found.spec.size == 18_432
    assert found.fits
