"""A compiler's text: shapes, instructions, sources, loops and counts."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.errors import MeshwrightError
from meshwright.hlo.instructions import Shape, Source
from meshwright.hlo.program import read_program

TABLES = """HloModule jit_step, is_scheduled=true, num_partitions=8

FileNames
1 "/somewhere/train.py"
2 "/venv/lib/python3.11/site-packages/jax/_src/numpy/ufuncs.py"

FunctionNames
1 "main"
2 "loss"
3 "add"

FileLocations
1 {file_name_id=1 function_name_id=1 line=40 end_line=40 column=8 end_column=8}
2 {file_name_id=1 function_name_id=2 line=12 end_line=12 column=6 end_column=6}
3 {file_name_id=2 function_name_id=3 line=99 end_line=99 column=6 end_column=6}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}


ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="p[\\'emb\\']"}
  %old = f32[4]{0} negate(%x), metadata={op_name="jit(f)/neg" source_file="a/b.py" source_line=7}
  %bare = f32[4]{0} negate(%old)
  ROOT %sum = f32[4]{0} add(%bare, %x), metadata={op_name="jit(f)/add" stack_frame_id=3}
}
"""


def loop(condition, body, start="constant(0)", config=""):
    return f"""HloModule jit_loop

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{{0}} get-tuple-element(%p), index=1
  %step = s32[] constant(1)
  %c = s32[] copy(%i)
  %next = {body}
  %y = f32[4]{{0}} negate(%x)
  ROOT %out = (s32[], f32[4]{{0}}) tuple(%next, %y)
}}

%test (q: (s32[], f32[4])) -> pred[] {{
  %q = (s32[], f32[4]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %end = s32[] constant(6)
  ROOT %more = {condition}
}}

ENTRY %main (x0: f32[4]) -> f32[4] {{
  %x0 = f32[4]{{0}} parameter(0)
  %zero = s32[] {start}
  %init = (s32[], f32[4]{{0}}) tuple(%zero, %x0)
  %w = (s32[], f32[4]{{0}}) while(%init), condition=%test, body=%body{config}
  ROOT %r = f32[4]{{0}} get-tuple-element(%w), index=1
}}
"""


UP = "s32[] add(%c, %step)"
BELOW = "pred[] compare(%j, %end), direction=LT"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[]", 4),
        ("bf16[64,256]{1,0:T(8,128)(2,1)S(1)}", 64 * 256 * 2),
        ("pred[3]", 3),
        ("s4[3]{0}", 2),
        ("u2[9]", 3),
        ("f8e4m3fn[5]", 5),
        ("f4e2m1fn[4]", 2),
        ("c64[2]", 16),
        ("token[]", 0),
        ("s32[<=8,2]", 64),
        ("((f32[2]{0}, s8[3]{0}), /*index=1*/bf16[1,2]{1,0}, u32[], token[])", 8 + 3 + 4 + 4),
    ],
)
def test_shapes_have_their_size(text, size):
    assert Shape(text).bytes == size


def test_instructions_come_apart():
    program = read_program(TABLES)
    assert [i.name for i in program.entry.instructions] == ["x", "old", "bare", "sum"]
    root = program.entry.root
    assert (root.opcode, root.operands, root.op_name) == ("add", ("bare", "x"), "jit(f)/add")
    assert program.entry.parameters[0].op_name == "p['emb']"
    assert program.devices == 8


def test_operands_with_shapes_and_brackets_are_read():
    program = read_program(
        "HloModule m\n\nENTRY %m (a: f32[8,128]) -> f32[8,128] {\n"
        "  %a = f32[8,128]{1,0:T(8,128)} parameter(0)\n"
        "  ROOT %b = f32[8,128]{1,0} add(f32[8,128]{1,0:T(8,128)} %a, f32[8,128] %a), x={1}\n"
        "}\n"
    )
    assert program.entry.root.operands == ("a", "a")
    assert program.entry.root.attribute("x") == "{1}"


def test_the_source_is_the_innermost_line_of_the_user():
    program = read_program(TABLES)
    names = program.entry.by_name
    assert program.source(names["sum"]) == Source("/somewhere/train.py", 12, "loss")
    assert [frame.line for frame in program.stack(names["sum"])] == [99, 12, 40]
    assert program.source(names["old"]) == Source("a/b.py", 7)
    assert program.source(names["bare"]) is None


def test_callers_that_are_numbered_plainly_are_read_too():
    plain = TABLES.replace("parent_frame_id=1}", "parent_frame_id=0}").replace(
        "3 {file_location_id=3 parent_frame_id=3}", "3 {file_location_id=3 parent_frame_id=2}"
    )
    plain = plain.replace(
        "2 {file_location_id=2 parent_frame_id=2}", "2 {file_location_id=2 parent_frame_id=1}"
    )
    program = read_program(plain)
    assert [frame.line for frame in program.stack(program.entry.root)] == [99, 12, 40]


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(MeshwrightError, match="no ENTRY computation"):
        read_program("HloModule nothing\n")


KERNEL = r"""HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %kernel = f32[4]{0} custom-call(%x), custom_call_target="k", frontend_attributes={metadata={
"profile":"{\"name\": \"}}}((\"}",
  "blocks": {"q": [4
]}}}, metadata={op_name="jit(f)/kernel"}, backend_config={ir = "ML\EF\22 } ) ]"}
  %copied = f32[4]{0} copy(%kernel), frontend_attributes={metadata={
"profile":"{"
}}
  ROOT %sum = f32[4]{0} add(%copied, %x)
}
"""


def test_an_instruction_goes_on_until_its_brackets_close():
    main = read_program(KERNEL).entry
    assert [each.name for each in main.instructions] == ["x", "kernel", "copied", "sum"]
    kernel = main.by_name["kernel"]
    assert kernel.op_name == "jit(f)/kernel"
    assert kernel.attribute("custom_call_target") == '"k"'
    assert kernel.attribute("backend_config") == r'{ir = "ML\EF\22 } ) ]"}'
    assert main.operands(main.root) == (main.by_name["copied"], main.by_name["x"])


def test_an_operand_that_nothing_defines_is_named_with_its_line():
    with pytest.raises(MeshwrightError, match="line 12 of the HLO text: %sum reads %gone, which"):
        read_program(KERNEL.replace("add(%copied", "add(%gone"))


def test_a_text_that_ends_inside_of_an_instruction_is_refused():
    with pytest.raises(MeshwrightError, match="line 5 of the HLO text: the brackets of '%kernel"):
        read_program(KERNEL[: KERNEL.index('  "blocks')])


@pytest.mark.parametrize(
    ("condition", "body", "start", "trips"),
    [
        (BELOW, UP, "constant(0)", 6),
        (BELOW, UP, "constant(2)", 4),
        (BELOW, UP, "constant(9)", 0),
        ("pred[] compare(%end, %j), direction=GT", UP, "constant(0)", 6),
        ("pred[] compare(%j, %end), direction=LE", UP, "constant(0)", 7),
        ("pred[] compare(%j, %end), direction=NE", UP, "constant(0)", 6),
        (
            "pred[] compare(%j, %end), direction=GT",
            "s32[] subtract(%c, %step)",
            "constant(10)",
            4,
        ),
    ],
)
def test_trips_are_derived_from_the_condition(condition, body, start, trips):
    program = read_program(loop(condition, body, start))
    assert program.run_count("body").count == trips
    assert program.run_count("test").count == trips + 1
    assert not program.run_count("body").at_least


def test_rounds_that_are_written_down_win():
    config = ', backend_config={"known_trip_count":{"n":"3"}}'
    assert read_program(loop(BELOW, UP, config=config)).run_count("body").count == 3


@pytest.mark.parametrize(
    ("condition", "body"),
    [(BELOW, "s32[] multiply(%c, %step)"), ("pred[] compare(%j, %j), direction=LT", UP)],
)
def test_unknown_rounds_are_marked(condition, body):
    runs = read_program(loop(condition, body)).run_count("body")
    assert (runs.count, runs.at_least, str(runs)) == (1, True, ">=1")


def test_branches_count_once_each_and_at_most():
    program = read_program(
        """HloModule m

%one (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}

%two (b: f32[]) -> f32[] {
  ROOT %b = f32[] parameter(0)
}

ENTRY %m (i: s32[], x: f32[]) -> f32[] {
  %i = s32[] parameter(0)
  %x = f32[] parameter(1)
  ROOT %r = f32[] conditional(%i, %x, %x), branch_computations={%one, %two}
}
"""
    )
    assert [str(program.run_count(name)) for name in ("one", "two")] == ["<=1", "<=1"]


def test_nested_loops_multiply():
    def nested(x):
        def inner(x, _):
            return jnp.sin(x @ x), None

        def outer(x, _):
            return jax.lax.scan(inner, x, length=3)[0], None

        return jax.lax.scan(outer, x, length=5)[0]

    text = jax.jit(nested).lower(jnp.ones((8, 8))).compile().as_text()
    assert read_program(text).flops == 15 * 2 * 8**3


@pytest.mark.parametrize(
    ("build", "shapes", "expected"),
    [
        (jnp.matmul, [(8, 16), (16, 4)], 2 * 8 * 16 * 4),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(3, 8, 16), (3, 16, 4)], 6 * 8 * 16 * 4),
        (
            lambda a, b: jax.lax.conv_general_dilated(
                a, b, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            [(2, 10, 10, 3), (3, 3, 3, 5)],
            2 * (2 * 8 * 8 * 5) * (3 * 3 * 3),
        ),
    ],
)
def test_operations_are_those_counted_by_hand(build, shapes, expected):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(build).lower(*args).compile().as_text()
    assert read_program(text).flops == expected


def test_padding_and_dilation_are_no_work():
    text = """HloModule m

ENTRY %m (a: f32[4,8], b: f32[4,8]) -> f32[4] {
  %a = f32[1,4,8]{2,1,0} parameter(0)
  %b = f32[4,8,1]{2,1,0} parameter(1)
  ROOT %c = f32[1,4,1]{2,1,0} convolution(%a, %b), \
window={size=4 stride=3 pad=3_3 lhs_dilate=4 rhs_reversal=1}, dim_labels=b0f_0io->b0f
}
"""
    meetings = sum(
        1
        for out in range(4)
        for tap in range(4)
        if 0 <= (at := 3 * out + tap - 3) <= 12 and at % 4 == 0
    )
    assert read_program(text).flops == 2 * meetings * 8


def test_only_some_compilers_estimate_cycles():
    assert read_program(TABLES).estimated_cycles is None
    config = ', backend_config={"window_config":{"estimated_cycles":"50"}}'
    text = loop(BELOW, UP).replace("negate(%x)", f"negate(%x){config}")
    assert read_program(text).estimated_cycles == 300


def test_reprs_are_short_however_large_the_program():
    shape = f"({', '.join(['f32[128,128]{1,0}'] * 100)})"
    text = f"HloModule {'x' * 300}\n\nENTRY %m () -> {shape} {{\n"
    text += f"  ROOT %{'y' * 300} = {shape} parameter(0)\n}}\n"
    program = read_program(text)
    root = program.entry.root
    shown = [program, program.entry, program.dataflow, program.sources, root, root.shape]
    assert [len(repr(value)) <= 200 for value in shown] == [True] * 6
    small = read_program(TABLES)
    assert repr(small) == "<Program jit_step, 1 computation, 8 devices>"
    assert repr(small.entry.root) == "<Instruction %sum = f32[4]{0} add>"
    assert repr(small.entry) == "<Computation main, 4 instructions>"


FORWARDED = """HloModule jit_f

%inner (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %kept = f32[4]{0} copy(%q)
}

%twice (r: f32[4]) -> f32[4] {
  ROOT %r = f32[4]{0} parameter(0)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %made = f32[4]{0} negate(%x)
  %pair = (f32[4]{0}, f32[4]{0}) tuple(%x, %made)
  %second = f32[4]{0} get-tuple-element(%pair), index=1
  %called = f32[4]{0} call(%second), to_apply=%inner
  %moved = f32[4]{0} custom-call(%called), custom_call_target="ConcatBitcast"
  %one = f32[4]{0} call(%made), to_apply=%twice
  %two = f32[4]{0} call(%x), to_apply=%twice
  ROOT %sum = f32[4]{0} add(%moved, %one)
}
"""


def test_the_origin_of_a_value_is_what_made_it():
    program = read_program(FORWARDED)
    entry, dataflow = program.entry, program.dataflow
    origin = dataflow.origin(entry.by_name["moved"])
    assert origin.instruction.name == "made"
    assert dataflow.origin(entry.by_name["pair"]).instruction.name == "pair"
    # A parameter of a computation with two callers has no one origin.
    assert dataflow.origin(entry.by_name["one"]).instruction.name == "r"


FETCHED = """HloModule fetched

%inner_body (i: (s32[], s8[4], s8[4])) -> (s32[], s8[4], s8[4]) {
  %i = (s32[], s8[4]{0}, s8[4]{0}) parameter(0)
  %n = s32[] get-tuple-element(%i), index=0
  %table = s8[4]{0} get-tuple-element(%i), index=1
  %near = s8[4]{0} get-tuple-element(%i), index=2
  %used = s8[4]{0} negate(%near)
  %next = s8[4]{0} copy(%table)
  ROOT %t = (s32[], s8[4]{0}, s8[4]{0}) tuple(%n, %table, %next)
}

%outer_body (o: (s32[], s8[4], s8[4])) -> (s32[], s8[4], s8[4]) {
  %o = (s32[], s8[4]{0}, s8[4]{0}) parameter(0)
  %loop = (s32[], s8[4]{0}, s8[4]{0}) while(%o), condition=%inner_end, body=%inner_body
  %m = s32[] get-tuple-element(%loop), index=0
  %far = s8[4]{0} get-tuple-element(%loop), index=1
  ROOT %u = (s32[], s8[4]{0}, s8[4]{0}) tuple(%m, %far, %far)
}

%inner_end (a: (s32[], s8[4], s8[4])) -> pred[] {
  %a = (s32[], s8[4]{0}, s8[4]{0}) parameter(0)
  ROOT %ae = pred[] constant(false)
}

%outer_end (b: (s32[], s8[4], s8[4])) -> pred[] {
  %b = (s32[], s8[4]{0}, s8[4]{0}) parameter(0)
  ROOT %be = pred[] constant(false)
}

ENTRY %main (x: s8[4]) -> (s32[], s8[4], s8[4]) {
  %x = s8[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %mask = s8[4]{0} constant({1, 2, 3, 4})
  %fetched = s8[4]{0} copy(%mask)
  %start = (s32[], s8[4]{0}, s8[4]{0}) tuple(%zero, %mask, %FIRST)
  ROOT %all = (s32[], s8[4]{0}, s8[4]{0}) while(%start), condition=%outer_end, body=%outer_body
}
"""


@pytest.mark.parametrize(
    ("first", "origin"),
    [("fetched", "mask"), ("x", "i")],  # the latter is something else in the first trip
)
def test_a_table_that_every_trip_fetches_anew_is_that_table(first, origin):
    program = read_program(FETCHED.replace("%FIRST", f"%{first}"))
    used = program.dataflow.computations["inner_body"].by_name["used"]
    near = program.dataflow.computations["inner_body"].by_name[used.operands[0]]
    assert program.dataflow.origin(near).instruction.name == origin


def test_an_element_of_a_tuple_may_be_written_by_its_number():
    program = read_program("""HloModule pair

ENTRY %main (p: (f32[4], (s32[2], bf16[8]))) -> f32[4] {
  %p = (f32[4]{0}, /*index=1*/(s32[2]{0}, bf16[8]{0:T(8,128)})) parameter(0)
  %wide = f32[8]{0} convert(%p#1#1)
  ROOT %sum = f32[4]{0} add(%p#0, %p#0)
}""")
    main = program.entry
    (read,) = main.operands(main.by_name["wide"])
    assert (read.opcode, str(read.shape.leaves[0])) == ("get-tuple-element", "bf16[8]")
    assert main.operands(read)[0].name == "p#1" and read.attribute("index") == "1"
    assert [each.name for each in main.operands(main.root)] == ["p#0", "p#0"]
    # A number that no tuple has is no value of this program.
    with pytest.raises(MeshwrightError, match="line 5"):
        read_program("""HloModule none

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %sum = f32[4]{0} add(%y#0, %x)
}""")
