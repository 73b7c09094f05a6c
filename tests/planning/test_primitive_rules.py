"""Every rule against the real partitioner: an operation alone, one dim cut, its collectives."""

import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from rule_programs import ELEMENTWISE, KERNELS, NEW, PROGRAMS, Program

import meshwright as mw
from meshwright._compat_lowering import cudnn_of
from meshwright.planning import primitive_rules
from meshwright.planning.kernel_rules import run_on_parts
from meshwright.planning.primitive_rules import rule_of
from meshwright.planning.traced_program import read_program

WAYS = 4
COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|"
    r"collective-permute|collective-broadcast)(?:-start)?\("
)
# Their partial results are gathered, each with its place, and reduced again by everyone.
GATHERED_PARTS = {"argmax", "argmin", "reduce"}
# Whole dims that are not compiled cut, by (platform, label): what would be seen instead.
UNCHECKED = {
    ("cpu", "fft"): "no collective since jax 0.12",
    ("cpu", "fft of two dims"): "no collective since jax 0.12",
    ("cuda", "fft"): "no collective since jax 0.12",
    ("cuda", "fft of two dims"): "no collective since jax 0.12",
    ("cpu", "layout_constraint"): "no collective since jax 0.12",
    ("tpu", "layout_constraint"): "no collective since jax 0.12",
    ("cuda", "layout_constraint"): "no collective since jax 0.12",
    ("cpu", "pallas_call"): "it is interpreted, so XLA sees the operations of its body",
    ("cuda", "reduce of one operand"): "the compiler aborts the process",
    ("cuda", "reduce_xor"): "the compiler aborts the process",
    ("tpu", "conv_general_dilated in groups"): "channels cut into no more parts than groups",
    ("tpu", "conv_general_dilated in groups gradient"): "the same",
    **{
        (platform, "symmetric_product"): "the addend is cut by one of its equal dims"
        for platform in ("cpu", "tpu", "cuda")
    },
}
# What JAX does not lower for a platform, or not without the hardware.
NOT_ON = {
    "tpu": "eig hessenberg schur tridiagonal custom_partitioning ormqr".split(),
    "cuda": "eig hessenberg schur".split(),
}
ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
# Here only.
ON_CPUS = ("ffi_call", "pallas_call", "pure_callback")
# Rules that no program here shows, and why.
UNSHOWN = {
    "cudnn_fusion": "a GPU's library",
    "debug_callback": "no result",
    "debug_print": "no result",
    **dict.fromkeys(ATTENTION, "a GPU's library, tested below"),
    "dot_product_attention_bwd": "what its wrapper becomes",
    "dot_product_attention_fwd": "what its wrapper becomes",
    "io_callback": "like pure_callback, with an order",
    "reshard": "a layout of the user's",
    "rng_uniform": "all of a seed that is not the program's",
    "shard_map": "a layout of the user's",
    "sharding_constraint": "a layout of the user's",
}


def equation(program):
    """The program's equation with the primitive in question, however deep."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == program.primitive:
                yield eqn
                continue
            for param in eqn.params.values():
                for inner in param if isinstance(param, tuple | list) else (param,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from walk(inner)

    found = list(walk(jax.make_jaxpr(program.function)(*program.shapes).jaxpr))
    assert found, f"{program.label} has no {program.primitive}"
    return found[0]


class Alone:
    """One equation as a program of its own: its operands are arguments, but for literals."""

    def __init__(self, eqn, platform="cpu"):
        self.eqn = eqn
        self.inputs = [tuple(v.aval.shape) for v in eqn.invars]
        self.outputs = [tuple(v.aval.shape) for v in eqn.outvars]
        self.rule = rule_of(eqn.primitive.name, eqn.params, self.inputs, self.outputs, platform)
        self.given = [i for i, v in enumerate(eqn.invars) if not hasattr(v, "val")]
        self.avals = [eqn.invars[i].aval for i in self.given]

    def __call__(self, *arrays):
        given = dict(zip(self.given, arrays, strict=True))
        operands = [given.get(i, getattr(v, "val", None)) for i, v in enumerate(self.eqn.invars)]
        found = self.eqn.primitive.bind(*operands, **self.eqn.params)
        return found if self.eqn.primitive.multiple_results else [found]

    @property
    def arrays(self):
        random = np.random.default_rng(0)
        return [some_array(aval, random) for aval in self.avals]

    def compiled(self, mesh, at, results=True):
        """Compiled with these dims cut; `results`: those of results that are not stay whole."""

        def sharding(index, shape):
            dims = [mesh.axis_names[0] if (index, d) in at else None for d in range(len(shape))]
            return NamedSharding(mesh, PartitionSpec(*dims))

        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.avals]
        ins = tuple(sharding(i, self.inputs[i]) for i in self.given)
        outs = [sharding(len(self.inputs) + i, shape) for i, shape in enumerate(self.outputs)]
        options = {"out_shardings": outs} if results else {}
        return jax.jit(self, in_shardings=ins, **options).lower(*shapes).compile()

    def divides(self, at):
        shapes = self.inputs + self.outputs
        return all(shapes[index][dim] % WAYS == 0 for index, dim in at)


def collectives(compiled):
    """Names and shapes of collectives; the predicate of a loop that all must leave is none."""
    found = COLLECTIVE.findall(compiled.as_text())
    return [(name, shape) for shape, name in found if not shape.startswith(("pred[]", "u32[]"))]


def entries(shape):
    """How many entries a shape of a program's text has, or the largest of a tuple."""
    sizes = re.findall(r"\w+\[([\d,]*)\]", shape)
    return max(math.prod(int(n) for n in size.split(",") if n) for size in sizes)


def check_dim(alone, mesh, dim, unchecked=False, values=None):
    """Compile with one iteration dim cut; assert that the partitioner does what the rule says."""
    first_result = len(alone.inputs)
    if dim.kind == "whole":
        for at in [dim.at] if dim.tied else [(one,) for one in dim.at]:
            # A result that is cut alone is computed whole and sliced, which no collective shows;
            # and what mesh axes do not divide cannot be cut.
            if unchecked or at[0][0] >= first_result or not alone.divides(at):
                continue
            to_results = any(index >= first_result for index, _ in at)
            try:
                compiled = alone.compiled(mesh, at, to_results)
            except jax.errors.JaxRuntimeError as error:
                assert "UNIMPLEMENTED" in str(error)
            else:
                assert collectives(compiled), (dim, "could be cut")
        return
    assert alone.divides(dim.at), f"make the sizes of {dim} multiples of {WAYS}"
    compiled = alone.compiled(mesh, dim.at)
    found = collectives(compiled)
    names = {name for name, _ in found}
    if dim.kind == "free":
        assert not found, (dim, found)
    elif alone.eqn.primitive.name in GATHERED_PARTS and len(alone.eqn.invars) != 2:
        most = WAYS * math.prod(alone.outputs[0])
        assert names == {"all-gather"}, (dim, found)
        assert all(entries(shape) <= most for _, shape in found), (dim, found)
    else:
        assert names in ({"all-reduce"}, {"reduce-scatter"}), (dim, found)
    if values is not None:
        arrays, expected = values
        placed = [
            jax.device_put(x, s) for x, s in zip(arrays, compiled.input_shardings[0], strict=True)
        ]
        for got, want in zip(compiled(*placed), expected, strict=True):
            assert_equal(got, want)


def assert_equal(got, want):
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    got, want = np.asarray(got), np.asarray(want)
    if np.issubdtype(got.dtype, np.inexact) or got.dtype == jnp.bfloat16:
        got, want = got.astype(np.complex64), want.astype(np.complex64)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    else:
        np.testing.assert_array_equal(got, want)


def some_array(aval, random):
    """Numbers for an operand: small ones, well within the domain of most functions."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        words = random.integers(0, 99, (*aval.shape, 2)).astype(np.uint32)
        return jax.random.wrap_key_data(words)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        made = random.uniform(0.1, 0.9, aval.shape)
        if len(aval.shape) > 1 and aval.shape[-1] == aval.shape[-2]:  # a matrix to decompose
            made = made + np.swapaxes(made, -1, -2) + aval.shape[-1] * np.eye(aval.shape[-1])
        return jnp.asarray(made, aval.dtype)
    return jnp.asarray(
        random.integers(0, 8, aval.shape) % (2 if aval.dtype == bool else 8), aval.dtype
    )


@pytest.fixture(scope="module")
def mesh():
    return mw.mesh(f"cut:{WAYS}", devices=jax.devices()[:WAYS])


@pytest.mark.parametrize("label", PROGRAMS)
def test_a_dim_that_is_cut_does_what_its_rule_says_and_values_stay(label, mesh):
    alone = Alone(equation(PROGRAMS[label]))
    assert alone.rule.known
    cut = [dim for dim in alone.rule.dims if dim.kind != "whole"]
    values = (alone.arrays, jax.jit(alone)(*alone.arrays)) if cut else None
    for dim in alone.rule.dims:
        check_dim(alone, mesh, dim, ("cpu", label) in UNCHECKED, values)


def test_elementwise_functions_need_nothing_of_each_other(mesh):
    # One program of all of them: as many compilations would take longer than all other tests.
    functions = [Alone(equation(program)) for program in ELEMENTWISE.values()]
    for f in functions:
        arrays = [index for index, shape in enumerate(f.inputs + f.outputs) if shape]
        (dim,) = f.rule.dims
        assert (dim.kind, sorted(dim.at)) == ("free", [(index, 0) for index in arrays])
    arrays = [f.arrays for f in functions]
    cut = NamedSharding(mesh, PartitionSpec("cut"))
    both = jax.jit(
        lambda arrays: [f(*given) for f, given in zip(functions, arrays, strict=True)],
        in_shardings=cut,
        out_shardings=cut,
    )
    compiled = both.lower(arrays).compile()
    assert collectives(compiled) == []
    got = compiled(jax.device_put(arrays, cut))
    expected = jax.jit(lambda arrays: [f(*a) for f, a in zip(functions, arrays, strict=True)])(
        arrays
    )
    for name, one, other in zip(ELEMENTWISE, got, expected, strict=True):
        assert_equal(one[0], other[0]), name


@pytest.mark.parametrize("label", PROGRAMS)
def test_every_dim_is_in_one_iteration_dim(label):
    alone = Alone(equation(PROGRAMS[label]))
    shapes = alone.inputs + alone.outputs
    listed = [member for dim in alone.rule.dims for member in dim.at]
    assert sorted(listed) == [
        (index, dim) for index, shape in enumerate(shapes) for dim, n in enumerate(shape) if n > 1
    ]


@pytest.mark.compilers
@pytest.mark.parametrize(("platform", "on"), [("tpu", "v5e:2x2"), ("cuda", "h100:8")])
@pytest.mark.parametrize("label", [label for label in PROGRAMS if label not in ON_CPUS])
def test_the_vendors_compilers_do_what_the_rule_says(label, platform, on):
    if PROGRAMS[label].primitive in NOT_ON[platform]:
        pytest.skip(f"JAX cannot lower {PROGRAMS[label].primitive} for {platform} here")
    # A mesh axis of four, and on the GPUs one of two that shards nothing.
    mesh = mw.mesh(f"cut:{WAYS}, idle:-1", on=on)
    alone = Alone(equation(PROGRAMS[label]), platform)
    for dim in alone.rule.dims:
        check_dim(alone, mesh, dim, (platform, label) in UNCHECKED)


@pytest.mark.compilers
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(("platform", "on"), [("tpu", "v5e:2x2"), ("cuda", "h100:8")])
def test_a_kernel_is_not_partitioned(platform, on):
    """By XLA alone: the rule says along which dims `apply_plan` runs it on parts of its arrays."""
    if platform == "cuda" and jax.__version_info__ >= (0, 12):
        pytest.skip("since jax 0.12 Triton kernels are lowered where a GPU is, or is told of")
    alone = Alone(equation(KERNELS[platform]), platform)
    rows, columns = alone.rule.dims[0], alone.rule.dims[1:]
    assert (rows.kind, rows.at, rows.blocks) == ("free", ((0, 0), (1, 0)), 4)
    assert {dim.kind for dim in columns} == {"whole"}
    mesh = mw.mesh(f"cut:{WAYS}, idle:-1", on=on)
    if platform == "tpu":
        with pytest.raises(NotImplementedError, match="cannot be automatically partitioned"):
            alone.compiled(mesh, rows.at)
    else:
        found = collectives(alone.compiled(mesh, rows.at))
        assert {name for name, _ in found} == {"all-gather"}
    by_rows = PartitionSpec("cut")
    cut = jax.jit(
        jax.shard_map(
            lambda x: run_on_parts(alone.eqn, [x], [(8, 128)])[0],
            mesh=mesh,
            in_specs=by_rows,
            out_specs=by_rows,
            check_vma=False,
        )
    )
    whole = jax.ShapeDtypeStruct((32, 128), jnp.float32, sharding=NamedSharding(mesh, by_rows))
    compiled = cut.lower(whole).compile()
    assert collectives(compiled) == []


@pytest.mark.compilers
@pytest.mark.parametrize("primitive", ATTENTION)
def test_cudnn_attention_is_cut_by_batch_and_heads(primitive):
    wide, narrow = (jax.ShapeDtypeStruct((8, 256, heads, 64), jnp.bfloat16) for heads in (16, 4))

    def loss(query, key, value):
        found = jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
        return found.astype(jnp.float32).sum()

    program = Program(primitive, primitive, jax.grad(loss, (0, 1, 2)), (wide, narrow, narrow))
    with cudnn_of((9, 0), 91000):
        alone = Alone(equation(program), "cuda")
    free = [dim for dim in alone.rule.dims if dim.kind == "free"]
    assert [dim.at[:3] for dim in free] == [((0, 0), (1, 0), (2, 0)), ((0, 2), (1, 2), (2, 2))]
    for dim in free:
        check_dim(alone, mw.mesh(f"cut:{WAYS}, idle:-1", on="h100:8"), dim)
    products = 2 if primitive == ATTENTION[0] else 5
    assert alone.rule.flops == products * 2 * 8 * 16 * 256 * 256 * 64


def test_every_rule_has_a_program():
    shown = {program.primitive for program in (PROGRAMS | ELEMENTWISE).values()}
    assert set(primitive_rules._RULES) - shown - set(NEW) == set(UNSHOWN)


def test_a_primitive_without_a_rule_is_guessed_by_sizes_and_said_so():
    rule = rule_of("mystery", {}, [(8, 16), (8, 1), ()], [(8, 16)])
    assert not rule.known
    assert [(dim.kind, dim.at) for dim in rule.dims] == [
        ("free", ((0, 0), (1, 0), (3, 0))),
        ("free", ((0, 1), (3, 1))),
    ]
    rule = rule_of("mystery", {}, [(8, 16)], [(8, 12)])
    assert [(dim.kind, dim.at, dim.tied) for dim in rule.dims] == [
        ("free", ((0, 0), (1, 0)), True),
        ("whole", ((1, 1),), True),
        ("whole", ((0, 1),), False),
    ]
    assert rule_of("mystery", {}, [(8,)], []).dims[0].kind == "whole"


@pytest.mark.parametrize(
    ("label", "flops"),
    [
        ("dot_general", 2 * 16 * 32 * 64),
        ("dot_general with a batch", 2 * 8 * 16 * 32 * 64),
        ("dot_general of two contracted dims", 2 * 8 * 16 * 32 * 32),
        ("ragged_dot_general", 2 * 1024 * 128 * 256),
        ("ragged_dot_general contracted", 2 * 1024 * 128 * 256),
        # Of 3 x 16 places along a dim, 2 are padding.
        ("conv_general_dilated", 2 * 8 * 16 * 46 * 46 * 8),
        ("conv_general_dilated 1x1", 2 * 8 * 16 * 16 * 16 * 8),
        ("conv_general_dilated of patches", 2 * 8 * 4 * 4 * 16 * 4 * 4 * 8),
        ("conv_general_dilated gradient", 2 * 8 * 16 * 46 * 46 * 8),
        # As many products as the convolution with a stride of 2 that it is the gradient of.
        ("conv_general_dilated dilated image", 2 * 8 * 16 * 47 * 47 * 8),
        ("conv_general_dilated depthwise", 2 * 8 * 16 * 46 * 46),
        ("conv_general_dilated depthwise gradient", 2 * 8 * 16 * 46 * 46),
        ("conv_general_dilated in groups", 2 * 8 * 32 * 46 * 46 * 4),
        ("conv_general_dilated in groups gradient", 2 * 8 * 32 * 46 * 46 * 4),
        ("add", 0),
    ],
)
def test_work_of_products(label, flops):
    assert Alone(equation((PROGRAMS | ELEMENTWISE)[label])).rule.flops == flops


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=4)


@hypothesis.given(shapes, st.data())
def test_parts_of_a_reshaped_array_are_parts_of_the_array_reshaped(shape, data):
    # Another shape of the same entries, by merging and splitting at divisors.
    entries, other = math.prod(shape), []
    while entries > 1 and len(other) < 5:
        other.append(
            data.draw(st.sampled_from([n for n in range(1, entries + 1) if entries % n == 0]))
        )
        entries //= other[-1]
    other.append(entries)
    array = np.arange(math.prod(shape)).reshape(shape)
    for dim in rule_of("reshape", {"dimensions": None}, [tuple(shape)], [tuple(other)]).dims:
        if dim.kind == "free":
            (_, a), (_, b) = dim.at
            for ways in range(1, math.gcd(shape[a], other[b]) + 1):
                if math.gcd(shape[a], other[b]) % ways == 0:
                    parts = np.split(array, ways, a)
                    expected = np.split(array.reshape(other), ways, b)
                    for part, want in zip(parts, expected, strict=True):
                        np.testing.assert_array_equal(part.reshape(want.shape), want)


@pytest.mark.parametrize("name", ["tiny", "moe-tiny", "vit-tiny", "conv-tiny"])
def test_presets_have_no_primitive_without_a_rule(name):
    model = mw.models.model(name)
    closed = jax.make_jaxpr(model.train_step)(model.shapes(), model.batch(8))
    assert read_program(closed).unknown() == {}
