"""What is wrong with a request is said before anything is compiled, with the place and the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshwrightError, RehearsalError

MESH = "fsdp:4, tp:2"
W = jax.ShapeDtypeStruct((64, 64), "float32")
PARAMS = {"up": W, "down": W}


def step(params, x):
    return {"out": x @ params["up"] @ params["down"], "loss": jnp.sum(x)}


def rehearse(*args, function=step, **options):
    return mw.rehearse(function, *args, **{"mesh": MESH, "on": "cpu:8", "cache": False, **options})


def other_mesh():
    return jax.make_mesh((2, 4), ("fsdp", "tp"))


@pytest.mark.parametrize(
    ("out_shardings", "message"),
    [
        ({"out": P("fsdp", "ttp"), "loss": None}, r"out: dim 1: no mesh axis 'ttp'.*Did you mean"),
        ({"out": None, "loss": P("fsdp")}, r"loss: P\('fsdp',\) has 1 entry for an array with 0"),
        (P(None, "tp"), r"loss: P\(None, 'tp'\) has 2 entries"),
        ({"out": P("fsdp", "fsdp"), "loss": None}, r"out: .* uses axis 'fsdp' twice"),
        ({"out": ("fsdp", "tp"), "loss": None}, r"not like the tree of the results"),
        ({"out": "fsdp", "loss": None}, r"out: 'fsdp' is not a PartitionSpec\. Write P\('fsdp'\)"),
        ({"oout": P(), "loss": None}, r"not like the tree of the results.*Give a tree of specs"),
        (
            {"out": NamedSharding(other_mesh(), P("fsdp")), "loss": None},
            r"out: a sharding on the mesh 'fsdp:2, tp:4', but the mesh is 'fsdp:4, tp:2'",
        ),
    ],
)
def test_bad_out_shardings_name_the_result(out_shardings, message):
    with pytest.raises(RehearsalError, match=rf"(?s)out_shardings: .*{message}") as caught:
        rehearse(PARAMS, W, out_shardings=out_shardings)
    assert caught.value.option == "out_shardings"


def test_an_uneven_result_and_all_that_is_wrong_come_at_once():
    def odd(w):
        return w[:63], w[:, :5]

    with pytest.raises(RehearsalError, match="2 problems in what the step returns") as caught:
        rehearse(W, function=odd, out_shardings=(P("fsdp"), P(None, "tp")))
    assert "0: dim 0 has size 63, not divisible by 4" in str(caught.value)
    assert "1: dim 1 has size 5, not divisible by 2" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"up": P("fsdp")}, r"the tree differs from the arrays' tree.*'down' has no spec"),
        ({"up": P("nope"), "down": P()}, r"up: dim 0: no mesh axis 'nope'"),
        (P("fsdp", "tp", None), r"up: P\('fsdp', 'tp', None\) has 3 entries"),
        ({"up": "fsdp", "down": P()}, r"up: 'fsdp' is not a PartitionSpec"),
        (
            NamedSharding(other_mesh(), P("fsdp")),
            r"a sharding on the mesh 'fsdp:2, tp:4', but the mesh is 'fsdp:4, tp:2'",
        ),
        (
            {"up": NamedSharding(other_mesh(), P("fsdp")), "down": P()},
            r"up: a sharding on the mesh 'fsdp:2, tp:4', but the mesh is",
        ),
    ],
)
def test_bad_in_shardings_name_the_argument_and_the_leaf(given, message):
    pattern = rf"(?s)^in_shardings\[0\], of params: .*{message}"
    with pytest.raises(RehearsalError, match=pattern) as caught:
        rehearse(PARAMS, W, in_shardings=[given, None])
    assert caught.value.option == "in_shardings"


def test_an_argument_on_a_mesh_of_other_axes_names_both():
    w = jax.device_put(np.ones((64, 64), "float32"), NamedSharding(other_mesh(), P("tp")))
    text = r"up: a sharding on the mesh 'fsdp:2, tp:4', but the mesh is 'fsdp:4, tp:2'\. Say how"
    with pytest.raises(RehearsalError, match=text) as caught:
        rehearse({"up": w, "down": W}, W)
    assert caught.value.option == "in_shardings"
    assert rehearse({"up": w, "down": W}, W, in_shardings=[P("fsdp"), None]).fits


def test_shardings_of_other_devices_hold_where_the_axes_agree():
    """In all three places by their spec: arguments, in_shardings and out_shardings."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), devices=jax.devices()[::-1])
    rows = NamedSharding(mesh, P("fsdp"))
    placed = jax.device_put(np.ones((64, 64), "float32"), rows)
    plain = rehearse(W, W, function=jnp.add, in_shardings=[P("fsdp")] * 2, out_shardings=P("fsdp"))
    brought = rehearse(placed, W, function=jnp.add, in_shardings=[None, rows], out_shardings=rows)
    assert brought.arguments.device_bytes == plain.arguments.device_bytes
    assert brought.memory.outputs == plain.memory.outputs == 64 * 64 * 4 // 4
    assert len(brought.collectives) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": [("up", None)]}, "rules: options of partition, but in_shardings"),
        ({"uneven": "maybe"}, "uneven: 'maybe' is not one of"),
        ({"axes": ["fsdp"], "uneven": "replicate"}, "axes, uneven: options of partition, but"),
    ],
)
def test_options_of_partition_are_checked_where_nothing_is_left_to_decide(options, message):
    with pytest.raises(MeshwrightError, match=message) as caught:
        rehearse(PARAMS, W, in_shardings=[P(), P("fsdp")], **options)
    assert caught.value.option == next(iter(options))


def test_a_pipeline_is_sent_to_its_own_rehearsal():
    groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    pipeline = mw.pipeline(lambda w, x: jnp.sum(mw.stage_end(x @ w) @ w), groups, microbatches=2)
    with pytest.raises(RehearsalError, match=r"is a pipeline.*rehearse_pipeline\(step, \*args\)"):
        rehearse(W, W, function=pipeline)


def test_texts_and_objects_are_a_part_of_a_step_without_a_jit():
    def scaled(w, how, settings):
        return w * settings["by"] if how == "double" else w @ w

    doubled = rehearse(W, "double", {"by": 2, "note": object()}, function=scaled)
    assert doubled.flops < rehearse(W, "square", {"by": 2}, function=scaled).flops
    static = jax.jit(scaled, static_argnums=1)
    assert rehearse(W, "double", {"by": 2}, function=static).fits
    with pytest.raises(RehearsalError, match=r"(?s)settings/note: 'x' is no array\..*static_argn"):
        rehearse(W, "double", {"by": 2, "note": "x"}, function=static)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codegen": "no"}, "codegen: 'no' is neither True nor False"),
        ({"codegen": False}, "cpu:8 is compiled by the CPU's"),
        ({"codegen": False, "on": "v5e:2x4", "compiler": "cpu"}, "compiled by the CPU's"),
        ({"codegen": False, "on": "h100:8"}, "h100:8 is compiled by the GPU's"),
        ({"compiler": "tpu"}, "'tpu' is not known. 'vendor' is meant: on= says whose. 'vendor' is"),
        ({"compiler": "clang"}, "'clang' is not known. 'vendor' is that of the hardware"),
        ({"progress": "no"}, "progress: 'no' is not True or False"),
        ({"cache": "/proc/nope"}, "cache: /proc/nope cannot be made: No such file .* cache=False"),
        ({"cache": __file__}, r"bad_input\.py cannot be made: File exists"),
    ],
)
def test_bad_options_of_the_compile_are_named(options, message):
    with pytest.raises(RehearsalError, match=message) as raised:
        rehearse(PARAMS, W, **options)
    assert raised.value.option == next(iter(options))


def test_in_shardings_do_not_say_what_stays_on_the_host():
    host = NamedSharding(mw.abstract_mesh(MESH), P("fsdp"), memory_kind="pinned_host")
    for given, where in ((host, ""), ({"up": host, "down": P()}, ".*up: ")):
        pattern = rf"(?s)^in_shardings\[0\], of params: {where}a sharding in memory 'pinned_host'"
        with pytest.raises(RehearsalError, match=pattern):
            rehearse(PARAMS, W, in_shardings=[given, None])


@pytest.mark.parametrize(
    ("mesh", "on", "message"),
    [
        (
            "fsdp:8",
            "cpu:8",
            r"^batch: 12 rows cannot be sharded over 8 devices \(fsdp\)\. Take a multiple",
        ),
        (
            "fsdp:3, tp:2",
            "cpu:6",
            r"^mesh: tiny cannot be sharded over it, \d+ problems, the first: ",
        ),
    ],
)
def test_a_model_that_the_devices_cannot_share_evenly(mesh, on, message):
    with pytest.raises(RehearsalError, match=message):
        mw.rehearse_model("tiny", batch=12, mesh=mesh, on=on)
