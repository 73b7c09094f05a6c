"""What a plan is predicted to cost, against the collectives that the partitioner makes of it."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.planning.exchange_costs import ExchangeCosts
from meshwright.planning.made_plans import unasked_part
from meshwright.planning.plan_search import speeds_on
from meshwright.planning.written_forms import SLICE_SECONDS

ROWS, WIDTH, HIDDEN = 512, 256, 1024


def step(params, x):
    def loss(params):
        return ((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def shapes(rows=ROWS):
    params = {
        "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), "float32"),
        "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), "float32"),
    }
    return params, jax.ShapeDtypeStruct((rows, WIDTH), "float32")


def planned(lists, mesh="fsdp:8", rows=ROWS):
    p = mw.plan(
        step, *shapes(rows), on="cpu:8", mesh=mesh, donate_argnums=0, compiler="cpu", progress=False
    )
    p.layouts.lists = tuple(tuple(p.groups.index(name) for name in order) for order in lists)
    return p


def by_kind(pairs):
    total = {}
    for kind, size in pairs:
        total[kind] = total.get(kind, 0) + size
    return total


def predicted(p):
    return by_kind((entry.kind, entry.bytes * times) for entry, _, times in p.exchanges())


def compiled(p):
    r = p.rehearse(compiler="cpu", progress=False)
    return by_kind((entry.kind, entry.total_bytes) for entry in r.collectives if entry.bytes > 4096)


def fsdp_on(on):
    p = mw.plan(step, *shapes(), on=on, mesh="fsdp:8", donate_argnums=0, progress=False)
    p.layouts.lists = (tuple(p.groups.index(name) for name in ("batch", "embed")),)
    return p


@pytest.mark.parametrize(("on", "narrower"), [("v5e:2x4", 2), ("h100:8", 1)])
def test_a_tpu_gathers_what_it_multiplies_as_bf16(on, narrower):
    p = fsdp_on(on)
    works = [p.costs.work(each) for each in p.costs.program.operations]
    most = max(sum(p.costs.way(work, p.lists).gathered) for work in works if work.multiplies)
    weight = WIDTH * HIDDEN * 4
    assert most == weight / narrower
    sent = predicted(p)
    assert sent["all-gather"] == pytest.approx(2 * weight / narrower)
    assert sent["reduce-scatter"] == pytest.approx(2 * weight)  # as it is added up


@pytest.mark.parametrize(
    ("dtypes", "precision", "sent_as"),
    [
        (("float32", "float32"), None, (0.5, 0.5)),
        (("float32", "float32"), "highest", (1.0, 1.0)),
        (("float32", "bfloat16"), None, (0.5, 1.0)),
        (("bfloat16", "bfloat16"), None, (1.0, 1.0)),
    ],
)
def test_only_float32_operands_by_default_are_sent_narrower(dtypes, precision, sent_as):
    def multiply(x, w):
        dims = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(x, w, dims, precision, preferred_element_type="float32")

    args = (jax.ShapeDtypeStruct((512, 512), dtype) for dtype in dtypes)
    p = mw.plan(multiply, *args, on="v5e:2x4", mesh="fsdp:8", progress=False, pipelines=False)
    (work,) = {p.costs.work(op) for op in p.costs.program.operations if op.flops}
    assert work.sent_as == sent_as


@pytest.mark.compilers
def test_the_compiler_of_a_tpu_gathers_so():
    made = fsdp_on("v5e:2x4").rehearse(codegen=False, progress=False).collectives
    gathered = [entry for entry in made if entry.kind == "all-gather" and entry.bytes > 2**16]
    assert {(entry.dtype, entry.bytes) for entry in gathered} == {("bf16", WIDTH * HIDDEN * 2)}


@pytest.mark.parametrize("layers", [1, 32])
def test_weights_are_gathered_once_more_for_a_backward_pass_that_is_far(layers):
    def deep(params, x):
        def loss(params):
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return (y**2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16")] * layers
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16")
    p = mw.plan(deep, weights, x, on="v5e:2x4", mesh="fsdp:8", donate_argnums=0, progress=False)
    kinds = {size: kind for kind, sizes in enumerate(p.costs.groups.sizes) for size in sizes}
    p.layouts.lists = (
        (kinds[ROWS], *(k for k in range(p.costs.groups.count) if k != kinds[ROWS])),
    )
    gathered = predicted(p)["all-gather"] / (WIDTH * WIDTH * 2)
    assert gathered == 1 if layers == 1 else layers + 2 < gathered < 2 * layers


def slices_added(table, ids, rows):
    # What is outside is dropped, so that this stays as it is written.
    numbers = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))
    return table + jax.lax.scatter_add(jnp.zeros_like(table), ids[:, None], rows, numbers)


SLICES = [((4096, 256), "float32"), ((8192,), "int32"), ((8192, 1, 256), "float32")]


def by_slices_args():
    return [jax.ShapeDtypeStruct(*each) for each in SLICES]


@pytest.fixture(scope="module")
def by_slices():
    options = {"mesh": "dp:8", "donate_argnums": 0, "pipelines": False, "progress": False}
    return mw.plan(slices_added, *by_slices_args(), on="v5e:2x4", **options)


def test_a_tpu_adds_slices_one_by_one_so_that_their_rows_are_cut(by_slices):
    costs, program = by_slices.costs, by_slices.costs.program
    number = next(n for n, op in enumerate(program.operations) if op.primitive == "scatter-add")
    work = costs.work(program.operations[number])
    assert work.one_by_one == 8192
    assert by_slices.predicted.compute >= 8192 / 8 * SLICE_SECONDS
    operands, made, in_full = by_slices.layouts.around(number)
    assert in_full
    assert [*operands, *made] == [jax.P(), jax.P("dp"), jax.P("dp"), jax.P()]
    gpu = mw.plan(slices_added, *by_slices_args(), on="h100:8", mesh="dp:8", progress=False)
    assert not any(gpu.costs.work(op).one_by_one for op in gpu.costs.program.operations)


@pytest.mark.compilers
def test_the_compiler_of_a_tpu_adds_only_a_devices_own_slices(by_slices):
    found = by_slices.rehearse(codegen=False, progress=False)
    (loop,) = (line for line in found.text.splitlines() if " while(" in line)
    assert "s32[1024" in loop  # of 8,192
    assert found.time.total == pytest.approx(by_slices.predicted.seconds, rel=0.4)


def test_data_parallelism_sums_every_gradient_once():
    p = planned([["batch"]])
    weights = 2 * WIDTH * HIDDEN * 4
    assert predicted(p) == {"all-reduce": pytest.approx(weights)}
    assert compiled(p) == {"all-reduce": pytest.approx(weights, rel=1e-4)}


def test_fsdp_gathers_weights_and_scatters_gradients():
    p = planned([["batch", "embed"]])
    found = predicted(p)
    weight = WIDTH * HIDDEN * 4
    # The CPU's compiler makes an all-reduce of a scatter.
    assert found["all-gather"] == pytest.approx(2 * weight)
    assert found["reduce-scatter"] == pytest.approx(2 * weight)
    made = compiled(p)
    assert made["all-gather"] == 2 * weight
    assert made["all-reduce"] == pytest.approx(2 * weight, rel=1e-4)


def test_tensor_parallelism_sums_activations():
    p = planned([["batch"]])
    p.layouts.lists = ((p.costs.groups.sizes.index((HIDDEN,)),),)
    rows = ROWS * WIDTH * 4
    assert predicted(p) == {"all-reduce": pytest.approx(rows)}
    assert compiled(p) == {"all-reduce": pytest.approx(rows, rel=1e-4)}


def test_nothing_is_hidden_on_simulated_devices():
    assert planned([["batch", "embed"]]).predicted.hidden == 0


def test_memory_has_all_arguments_once():
    p = planned([["batch", "embed"]])
    totals = p.costs.totals(p.lists)
    arguments = (2 * WIDTH * HIDDEN + ROWS * WIDTH) * 4 / 8
    # Beside them: a gathered weight, gradients, and what the backward pass needs of the forward.
    assert arguments < totals.bytes < 8 * arguments


def test_a_batch_that_the_axis_does_not_divide_is_not_cut():
    p = planned([["batch"]], rows=12)
    assert predicted(p) == {}


@pytest.mark.parametrize("rows, known", [(8192, ["batch"]), (64, ["batch", "embed"])])
def test_no_known_layout_costs_less_than_what_was_found(rows, known):
    p = mw.plan(step, *shapes(rows), on="v5e:2x4", donate_argnums=0, mesh="fsdp:8", progress=False)
    lists = (tuple(p.groups.index(name) for name in known),)
    assert p.costs.objective(p.lists) <= p.costs.objective(lists) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("on", "mesh", "lists", "hides"),
    [
        ("v5e:4x4", "fsdp:16", [["batch", "embed"]], True),
        ("v5p:4x4x4", "fsdp:64", [["batch", "embed"]], False),  # too many pieces
        ("v5e:4x4", "fsdp:4, dp:4", [["batch", "embed"], ["batch"]], False),  # rows in more parts
        ("h100:8x8", "fsdp:64", [["batch", "embed"]], True),  # started early, not in pieces
    ],
)
def test_a_tpu_hides_what_its_products_take_in_pieces(on, mesh, lists, hides):
    # By libtpu and the CUDA compiler: decoders with fsdp over 8 to 64 devices.
    params = {
        "up": jax.ShapeDtypeStruct((4096, 16384), "bfloat16"),
        "down": jax.ShapeDtypeStruct((16384, 4096), "bfloat16"),
    }
    x = jax.ShapeDtypeStruct((2**17, 4096), "bfloat16")
    p = mw.plan(step, params, x, on=on, mesh=mesh, donate_argnums=0, pipelines=False)
    costs = p.layouts.costs
    chosen = tuple(tuple(p.groups.index(name) for name in order) for order in lists)
    assert (costs.totals(chosen).hidden > 0) == hides


def product(equation, first, second, lists):
    """A plan of one product on 4 x 4 chips; `lists` name the dims of an axis by their lengths."""

    def multiply(x, w):
        return jnp.einsum(equation, x, w)

    x, w = (jax.ShapeDtypeStruct(dims, "bfloat16") for dims in (first, second))
    p = mw.plan(multiply, x, w, on="v5e:4x4", mesh="dp:4, tp:4", progress=False, pipelines=False)
    kinds = {sizes[0]: kind for kind, sizes in enumerate(p.costs.groups.sizes)}
    p.layouts.lists = tuple(tuple(kinds[size] for size in order) for order in lists)
    return p


PRODUCTS = {
    "scattered in pieces": (
        ("bsf,fe->bse", (16, 2048, 14336), (14336, 4096), ((16,), (14336, 4096))),
        "collective-permute",
    ),
    "too short for pieces": (
        ("bsf,fe->bse", (16, 2048, 3072), (3072, 4096), ((16,), (3072, 4096))),
        "reduce-scatter",
    ),
    "scattered to heads": (
        ("bse,ehd->bshd", (16, 2048, 4096), (4096, 32, 128), ((16,), (4096, 32))),
        "all-reduce",
    ),
    "gathered along the sum": (
        ("bse,ef->bsf", (16, 2048, 4096), (4096, 14336), ((16,), (14336, 4096))),
        "collective-permute",
    ),
    "gathered along rows that another axis cuts": (
        ("bse,ef->bsf", (16, 2048, 4096), (4096, 14336), ((16,), (14336, 2048))),
        "all-gather",
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_how_a_tpu_exchanges_for_one_product(name):
    case, kind = PRODUCTS[name]
    p = product(*case)
    ((entry, work, _),) = p.exchanges()
    hidden = p.costs.way(work, p.lists).hidden
    assert (hidden > 0) == (kind == "collective-permute")
    assert kind in ("collective-permute", entry.kind)


@pytest.mark.compilers
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_compiler_of_a_tpu_exchanges_so(name):
    case, kind = PRODUCTS[name]
    made = product(*case).rehearse(progress=False, codegen=False).collectives
    assert {entry.kind for entry in made if entry.bytes > 2**16} == {kind}


# Rows of which the width is summed over: it lies cut by one axis, that of the weights by another.
APART = "bse,ef->bsf", (16, 2048, 4096), (4096, 14336), ((16, 4096), (14336, 4096))


def test_the_larger_of_two_operands_that_are_summed_over_apart_is_taken_in_pieces():
    p = product(*APART)
    seconds = {entry.bytes: entry.seconds for entry, _, _ in p.exchanges()}
    larger, smaller = 16 * 2048 * 4096 * 2 / 4, 4096 * 14336 * 2 / 4
    assert seconds.keys() == {larger, smaller}
    (work,) = {work for _, work, _ in p.exchanges()}
    hidden = p.costs.way(work, p.lists).hidden
    assert hidden == pytest.approx(0.9 * seconds[larger])


@pytest.mark.compilers
def test_the_compiler_of_a_tpu_takes_the_larger_in_pieces():
    made = product(*APART).rehearse(progress=False, codegen=False).collectives
    kinds = {(entry.kind, entry.over) for entry in made if entry.bytes > 2**20}
    assert {kind for kind, over in kinds if "tp" in over} == {"collective-permute"}
    assert {kind for kind, over in kinds if "dp" in over} == {"all-gather"}


def gates(count):
    """So many products of the same rows, whose width lies cut."""

    def multiply(x, weights):
        return [x @ w for w in weights]

    x = jax.ShapeDtypeStruct((16, 2048, 4096), "bfloat16")
    weights = [jax.ShapeDtypeStruct((4096, 14336), "bfloat16")] * count
    p = mw.plan(
        multiply, x, weights, on="v5e:4x4", mesh="dp:4, tp:4", progress=False, pipelines=False
    )
    kinds = {size: kind for kind, sizes in enumerate(p.costs.groups.sizes) for size in sizes}
    p.layouts.lists = ((kinds[16],), (kinds[14336], kinds[4096]))
    return p


@pytest.mark.parametrize(("count", "hides"), [(1, True), (2, False)])
def test_what_several_products_need_is_gathered_whole(count, hides):
    p = gates(count)
    assert (p.costs.totals(p.lists).hidden > 0) == hides


@pytest.mark.compilers
@pytest.mark.parametrize(("count", "kind"), [(1, "collective-permute"), (2, "all-gather")])
def test_the_compiler_of_a_tpu_gathers_for_several_products_once(count, kind):
    made = gates(count).rehearse(progress=False, codegen=False).collectives
    assert {entry.kind for entry in made if entry.bytes > 2**20} == {kind}


# Rows on one axis, and the sequence on the other: the gradient of a weight is summed over both.
SUMMED = "bsf,bse->fe", (16, 8192, 14336), (16, 8192, 4096), ((16, 14336), (8192,))


def test_sums_over_another_axis_as_well_are_not_scattered_in_pieces():
    p = product(*SUMMED)
    (work,) = {work for _, work, _ in p.exchanges()}
    assert {entry.kind for entry, _, _ in p.exchanges()} == {"reduce-scatter", "all-reduce"}
    assert p.costs.way(work, p.lists).hidden == 0


@pytest.mark.compilers
def test_the_compiler_of_a_tpu_does_not_take_such_sums_in_pieces():
    made = product(*SUMMED).rehearse(progress=False, codegen=False).collectives
    assert {entry.kind for entry in made if entry.bytes > 2**16} == {"reduce-scatter", "all-reduce"}


def convolved(channels, on="v5e:4x4"):
    """A step that trains one convolution, its rows and its weights cut by one axis."""

    def train(w, x):
        def loss(w):
            y = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jnp.sum(jnp.tanh(y) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    w = jax.ShapeDtypeStruct((3, 3, channels, channels // 2), "float32")
    x = jax.ShapeDtypeStruct((48, 40, 40, channels), "float32")
    p = mw.plan(train, w, x, on=on, mesh="fsdp:16", donate_argnums=0, pipelines=False)
    kinds = {sizes[0]: kind for kind, sizes in enumerate(p.costs.groups.sizes)}
    p.layouts.lists = ((kinds[48], kinds[channels // 2], kinds[channels]),)
    return p


@pytest.mark.parametrize(
    ("channels", "on", "kinds"),
    [
        (1024, "v5e:4x4", {"all-gather", "reduce-scatter"}),
        (128, "v5e:4x4", {"all-gather", "reduce-scatter"}),
        (1024, "h100:8x2", {"all-gather", "all-reduce"}),
    ],
)
def test_a_tpu_takes_what_large_convolutions_exchange_in_pieces(channels, on, kinds):
    p = convolved(channels, on)
    assert {exchange.kind for exchange, _, _ in p.costs.exchanges(p.layouts.lists)} == kinds
    assert (p.costs.totals(p.layouts.lists).hidden > 0) == ("reduce-scatter" in kinds)


@pytest.mark.compilers
@pytest.mark.parametrize("channels", [1024, 128])
def test_the_compiler_of_a_tpu_convolves_so(channels):
    made = convolved(channels).rehearse(progress=False, codegen=False).collectives
    assert {entry.kind for entry in made if entry.bytes > 2**14} == {"collective-permute"}


@pytest.mark.parametrize(
    ("have", "want", "kinds"),
    [
        # Rows lie cut by both axes, the second one inside: it can leave by itself.
        ({0: 0, 1: 0}, {0: 0, 1: 1}, ["all-to-all"]),
        ({0: 0, 1: 0}, {0: 0}, ["all-gather"]),
        # The first one leaves pieces in another order.
        ({0: 0, 1: 0}, {0: 1, 1: 0}, ["all-to-all", "collective-permute"]),
        ({0: 0, 1: 1}, {0: 1, 1: 1}, ["all-to-all", "collective-permute"]),
        ({0: 0, 1: 0}, {1: 0}, ["all-gather"]),
    ],
)
def test_an_axis_that_leaves_another_inside_of_it_costs_more(have, want, kinds):
    topology = mw.topology("v5e:4x4")
    costs = ExchangeCosts(speeds_on((4, 4), topology), topology, overlaps=True)
    log = []
    seconds = costs.move(2**26, have, want, log)
    assert [entry.kind for entry in log] == kinds
    assert seconds == pytest.approx(sum(entry.seconds for entry in log))
    whole = {0: 0, 1: 0} == have and want == {1: 0}
    assert log[0].bytes == (2**26 if whole else 2**24 if kinds == ["all-gather"] else 2**22)


def test_few_rows_are_exchanged_rather_than_the_weights_they_meet():
    p = planned([["batch", "embed"]], rows=16)
    weight = WIDTH * HIDDEN * 4
    assert max(exchange.bytes for exchange, _, _ in p.exchanges()) < weight / 2
    assert max(compiled(p).values()) < weight / 2
    many = planned([["batch", "embed"]], rows=8192)
    assert max(exchange.bytes for exchange, _, _ in many.exchanges()) == weight


def accumulating(scale):
    """A step over microbatches, whose gradients are added up in a loop."""

    def step(w, xs):
        def body(total, x):
            def loss(w):
                return ((jax.nn.relu(x @ w["up"] + w["bias"]) @ w["down"]) ** 2).mean()

            gradient = jax.tree.map(lambda g: g.astype("float32"), jax.grad(loss)(w))
            if scale != 1:
                gradient = jax.tree.map(lambda g: scale * g, gradient)
            return jax.tree.map(jnp.add, total, gradient), None

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, "float32"), w)
        total = jax.lax.scan(body, zeros, xs)[0]
        return jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), w, total)

    return step


def microbatches(on, scale=1, order=("batch",)):
    """A plan over rows of microbatches; the kind of their rows is `batch` here."""
    w = {
        "up": jax.ShapeDtypeStruct((512, 2048), "bfloat16"),
        "bias": jax.ShapeDtypeStruct((2048,), "bfloat16"),
        "down": jax.ShapeDtypeStruct((2048, 512), "bfloat16"),
    }
    xs = jax.ShapeDtypeStruct((4, 8192, 512), "bfloat16")
    options = {"on": on, "mesh": "dp:8", "pipelines": False, "progress": False}
    p = mw.plan(accumulating(scale), w, xs, donate_argnums=0, **options)
    (rows,) = (kind for kind, sizes in enumerate(p.costs.groups.sizes) if 8192 in sizes)
    kinds = {"batch": rows, "embed": p.groups.index("embed")}
    p.layouts.lists = (tuple(kinds[name] for name in order),)
    return p


@pytest.mark.parametrize(
    ("on", "scale", "order", "sums"),
    [
        ("v5e:2x4", 1, ("batch",), 1),
        ("h100:8", 1, ("batch",), 1),
        ("cpu:8", 1, ("batch",), 4),
        ("v5e:2x4", 0.25, ("batch",), 4),  # scaled before it is added
    ],
)
def test_sums_that_a_loop_only_adds_up_are_exchanged_after_it(on, scale, order, sums):
    p = microbatches(on, scale, order)
    expected = 2 * 512 * 2048 * 2 * sums
    assert predicted(p)["all-reduce"] == pytest.approx(expected, rel=0.01)
    if on == "cpu:8":
        assert compiled(p)["all-reduce"] == pytest.approx(2 * expected, rel=0.01)  # in float32


@pytest.mark.compilers
@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8"])
@pytest.mark.parametrize(("scale", "sums"), [(1, 1), (0.25, 4)])
def test_the_vendors_compilers_exchange_such_sums_after_the_loop(on, scale, sums):
    made = microbatches(on, scale).rehearse(progress=False).collectives
    assert {entry.times.count for entry in made if entry.bytes > 2**16} == {sums}


def gated(w, x):
    gate, up = jnp.split(x @ w["up"], 2, axis=1)
    return (jax.nn.silu(gate + 1.0) * (up + gate)) @ w["down"]


def without_last(w, x):
    return jnp.tanh((x @ w["up"])[:, :-1]).sum() + w["down"].sum()


@pytest.mark.parametrize(("function", "gathers"), [(gated, True), (without_last, False)])
def test_what_is_taken_apart_along_a_cut_dim_is_exchanged(function, gathers):
    w = {
        "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), "float32"),
        "down": jax.ShapeDtypeStruct((HIDDEN // 2, WIDTH), "float32"),
    }
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    p = mw.plan(function, w, x, on="cpu:8", mesh="tp:8", compiler="cpu", progress=False)
    arguments = zip(p.step.paths, p.costs.program.arguments, strict=True)
    (up,) = (p.costs.groups.layout[value] for path, value in arguments if path.endswith("up"))
    p.layouts.lists = ((up[1][0],),)
    size = ROWS * HIDDEN * 4
    assert (predicted(p).get("all-gather", 0) >= size) == gathers
    made = compiled(p)
    exchanged = made.get("all-gather", 0) + made.get("collective-permute", 0)
    exchanged += made.get("all-to-all", 0)
    assert (exchanged >= size / 8) == gathers


def by_words(params, tokens):
    def loss(params):
        logits = jnp.tanh(params["table"][tokens]) @ params["head"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -chosen.mean()

    return jax.grad(loss)(params)


def with_biases(params, x):
    def loss(params):
        hidden = jax.nn.relu(x @ params["up"] + params["up_bias"])
        return ((hidden @ params["down"] + params["down_bias"]) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@pytest.mark.parametrize(
    ("order", "cut"),
    [(["embed"], "tp"), (["batch", "embed"], None)],
    ids=["first", "last"],
)
def test_a_bias_is_cut_where_the_activations_are_that_it_is_added_to(order, cut):
    params, x = shapes()
    params["up_bias"] = jax.ShapeDtypeStruct((HIDDEN,), "float32")
    params["down_bias"] = jax.ShapeDtypeStruct((WIDTH,), "float32")
    p = mw.plan(with_biases, params, x, on="cpu:8", mesh="tp:8", compiler="cpu", progress=False)
    p.layouts.lists = (tuple(p.groups.index(name) for name in order),)
    arguments = dict(zip(p.step.paths, p.costs.program.arguments, strict=True))
    (bias,) = (value for path, value in arguments.items() if path.endswith("up_bias"))
    assert tuple(p.layouts.of_value(bias)) == ((cut,) if cut else ())
    if cut:  # nothing is gathered: the one sum is that of what the second product leaves
        assert set(compiled(p)) == {"all-reduce"}


def convolution(numbers):
    def step(params, x):
        def loss(w):
            return (
                jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers) ** 2
            ).mean()

        return params - 0.1 * jax.grad(loss)(params)

    return step


@pytest.mark.parametrize(
    ("numbers", "image", "kernel", "copied"),
    [
        (("NCHW", "OIHW", "NCHW"), (64, 128, 32, 32), (128, 128, 3, 3), True),
        (("NHWC", "HWIO", "NHWC"), (64, 32, 32, 128), (3, 3, 128, 128), False),
    ],
)
def test_a_tpu_copies_new_weights_whose_windows_are_their_last_dims(numbers, image, kernel, copied):
    x, w = jax.ShapeDtypeStruct(image, "float32"), jax.ShapeDtypeStruct(kernel, "float32")
    for on, expected in [("v6e:2x4", copied), ("h100:8", False)]:
        p = mw.plan(convolution(numbers), w, x, on=on, mesh="fsdp:8", progress=False)
        works = [p.costs.work(each) for each in p.costs.program.operations]
        assert any(work.copies for work in works) == expected


@pytest.mark.compilers
def test_exchanges_that_a_plan_implies_are_asked_for():
    params = {
        "table": jax.ShapeDtypeStruct((8192, 64), "float32"),
        "head": jax.ShapeDtypeStruct((64, 8192), "float32"),
    }
    tokens = jax.ShapeDtypeStruct((64, 512), "int32")
    p = mw.plan(by_words, params, tokens, on="v5e:2x4", mesh="fsdp:8", progress=False)
    head = p.costs.groups.layout[p.costs.program.arguments[0]]
    assert p.step.paths[0].endswith("head")
    batch = p.groups.index("batch")
    p.layouts.lists = ((head[1][0], batch),)  # logits are cut by words, and so need all labels
    r = p.rehearse(progress=False, codegen=False)
    implicit = sum(e.total_seconds for e in r.collectives if e.cause == "implicit resharding")
    assert implicit > 0.0
    assert unasked_part(p, r) < implicit / r.time.total
    p.layouts.lists = ((batch,),)  # under which the same program would be a surprise
    assert unasked_part(p, r) == pytest.approx(implicit / r.time.total)
