"""What a partitioning costs: as text, as a page, as JSON, in JAX's own notation."""

import json
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright._html import cut_picture
from meshwright.partitioning.decide import Options
from meshwright.partitioning.report import array_type, short_dtype

MESH = mw.mesh("fsdp:4, tp:2")
EXPLICIT = mw.mesh("fsdp:4, tp:2", axis_types="explicit")


def sds(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


TREE = {
    "embed": sds(32000, 1024, dtype=jnp.bfloat16),
    "layers": {"up": sds(24, 1024, 4096), "norm": sds(24, 1024)},
    "head": sds(1024, 32003),
    "scale": sds(7),
    "step": sds(dtype="int32"),
    "act": jnp.tanh,
}

GOLDEN = """\
6 arrays on fsdp:4, tp:2 (8 devices): 571.6 MiB, 71.53 MiB on each device
path         array                          bytes  on a device  copies
embed        bf16[32000@(tp,fsdp),1024]  62.5 MiB    7.812 MiB       1
head         f32[1024@(tp,fsdp),32003]    125 MiB    15.63 MiB       1
layers/norm  f32[24,1024]                  96 KiB       96 KiB       8
layers/up    f32[24,1024@fsdp,4096@tp]    384 MiB       48 MiB       1
scale        f32[7]                          28 B         28 B       8
step         i32[]                            4 B          4 B       8
replicated: 96.03 KiB, the largest layers/norm 96 KiB, scale 28 B, step 4 B"""


def test_the_text_is_as_it_is():
    assert str(mw.explain(TREE, MESH)) == GOLDEN
    assert str(mw.explain(TREE, MESH.abstract_mesh)) == GOLDEN


def test_specs_and_options_decide_what_is_described():
    tree = {"w": sds(64, 64)}
    assert mw.explain(tree, MESH, P("tp")).rows[0].text == "f32[64@tp,64]"
    assert mw.explain(tree, MESH, {"w": P(None, "tp")}).rows[0].text == "f32[64,64@tp]"
    assert mw.explain(tree, MESH, rules={"w": "fsdp"}).rows[0].text == "f32[64@fsdp,64]"


def test_placed_arrays_are_described_as_they_lie():
    host = {"w": np.ones((64, 64), np.float32), "v": np.ones((64, 64), np.float32)}
    placed = mw.shard(host, MESH, {"w": P(), "v": P(None, "tp")})
    report = mw.explain(placed, MESH)
    assert [row.text for row in report.rows] == ["f32[64,64@tp]", "f32[64,64]"]
    assert report.device_bytes == sum(x.addressable_shards[0].data.nbytes for x in placed.values())
    shapes = mw.shard(jax.eval_shape(lambda: host), MESH, P())
    assert mw.explain(shapes, MESH).device_bytes == 2 * 64 * 64 * 4
    assert mw.explain(placed, MESH.abstract_mesh).rows == report.rows


def test_specs_or_options_say_more_than_where_arrays_lie():
    placed = mw.shard({"w": np.ones((128, 128), np.float32)}, MESH, P())
    assert mw.explain(placed, MESH, P("tp")).rows[0].text == "f32[128@tp,128]"
    assert mw.explain(placed, MESH, axes=["tp"]).rows[0].text == "f32[128@tp,128]"


def test_arrays_that_are_not_on_this_mesh_are_described_as_partition_would_cut_them():
    host = {"w": np.ones((1024, 1024), np.float32)}
    other = mw.mesh("fsdp:2, tp:4")
    turned = jax.sharding.Mesh(MESH.devices[::-1], MESH.axis_names)
    for tree in (host, mw.shard(host, other, P()), mw.shard(host, turned, P()), jnp.ones((4,))):
        specs = mw.partition(tree, MESH)
        assert mw.explain(tree, MESH).rows == mw.explain(tree, MESH, specs).rows


def test_a_long_tree_is_cut_short():
    text = str(mw.explain({f"w{place:04}": sds(8) for place in range(10_000)}, MESH))
    lines = text.splitlines()
    assert lines[0].startswith("10,000 arrays on fsdp:4, tp:2 (8 devices)")
    assert lines[-2] == "... and 9,800 more arrays"
    assert lines[-1].startswith("replicated: 312.5 KiB, the largest w0000 32 B, ")
    assert lines[-1].endswith(" and 9,997 more")
    assert len(lines) == 2 + 200 + 2


def test_an_empty_tree_has_a_report():
    report = mw.explain({}, MESH)
    assert str(report).startswith("0 arrays on fsdp:4, tp:2 (8 devices): 0 B, 0 B on each device")
    assert report.to_json()["arrays"] == []
    assert "<svg" not in report._repr_html_()


SPECS = [
    P(),
    P("fsdp"),
    P(None, "tp"),
    P("tp", "fsdp"),
    P(("fsdp", "tp")),
    P(None, ("tp", "fsdp")),
    P(("fsdp",), None),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_notation_is_that_of_jax(spec, dtype):
    array = mw.shard(np.ones((16, 8), getattr(jnp, dtype)), EXPLICIT, spec)
    theirs = str(jax.typeof(array))
    ours = array_type((16, 8), dtype, spec)
    assert ours.partition("[")[2] == theirs.partition("[")[2]
    assert theirs.partition("[")[0] == dtype
    assert ours.partition("[")[0] == short_dtype(dtype)


@pytest.mark.parametrize("shape", [(), (8,), (4, 2, 8), (2, 4, 2, 2)])
def test_the_notation_is_that_of_jax_for_any_rank(shape):
    array = mw.shard(np.ones(shape, np.float32), EXPLICIT, min_shard_bytes=0)
    spec = mw.partition(array, EXPLICIT, min_shard_bytes=0)
    assert array_type(shape, "float32", spec).replace("f32", "float32") == str(jax.typeof(array))


def test_the_notation_of_keys_is_that_of_jax():
    keys = mw.shard(jax.random.split(jax.random.key(0), 8), EXPLICIT, P("fsdp"))
    assert array_type((8,), keys.dtype, P("fsdp")) == str(jax.typeof(keys))


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("float32", "f32"),
        ("bfloat16", "bf16"),
        ("int4", "i4"),
        ("uint8", "u8"),
        ("complex64", "c64"),
        ("bool", "bool"),
    ],
)
def test_types_are_short(dtype, text):
    assert short_dtype(getattr(jnp, dtype, dtype)) == text


def test_bytes_per_device_are_those_that_devices_hold():
    tree = {
        "a": np.ones((64, 256), np.float32),
        "b": np.ones((6, 32), jnp.bfloat16),
        "c": np.ones(7, np.int8),
        "d": [np.ones((3, 5), bool), np.float32(1)],
        "key": jax.random.split(jax.random.key(0), 1024),
        "empty": np.ones((0, 4), np.float32),
    }
    report = mw.explain(tree, MESH, min_shard_bytes=16)
    placed = mw.shard(tree, MESH, min_shard_bytes=16)
    held = dict.fromkeys(MESH.devices.flat, 0)
    for array, row in zip(jax.tree.leaves(placed), report.rows, strict=True):
        for shard in array.addressable_shards:
            assert shard.data.nbytes == row.device_bytes
            assert shard.data.shape == row.local
            held[shard.device] += shard.data.nbytes
        pieces = {str(shard.index) for shard in array.addressable_shards}
        assert row.copies == 8 // len(pieces)
        assert row.bytes == array.nbytes
    assert set(held.values()) == {report.device_bytes}
    assert report.bytes == sum(array.nbytes for array in jax.tree.leaves(placed))


def test_half_bytes_are_counted_as_halves():
    report = mw.explain({"w": sds(512, 512, dtype=jnp.int4)}, MESH)
    assert (report.bytes, report.device_bytes) == (131072, 16384)


def test_whole_arrays_are_listed_largest_first():
    tree = {"a": sds(3), "b": sds(300), "c": sds(128, 128)}
    assert [row.path for row in mw.explain(tree, MESH).replicated] == ["b", "a"]


def test_on_one_device_nothing_is_said_about_copies():
    mesh = mw.mesh("fsdp:1", devices=jax.devices()[:1])
    text = str(mw.explain({"w": sds(64, 64)}, mesh))
    assert "replicated" not in text


class Page(HTMLParser):
    """Checks that tags close in order, and keeps them with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_draws_arrays_of_one_to_four_dims():
    tree = {
        "one": sds(4096),
        "two": sds(1024, 4096),
        "three": sds(8, 64, 64),
        "four": sds(4, 8, 64, 64),
        "scalar": sds(),
    }
    page = Page(mw.explain(tree, MESH, min_shard_bytes=4096)._repr_html_())
    drawn = [tag for tag, _ in page.tags]
    assert drawn.count("svg") == 4
    captions = " ".join(page.words)
    for path in ("one", "two", "three", "four"):
        assert f"{path}: f32[" in captions
    assert "1024 in 4 x 4096 in 2" in captions


def test_the_page_asks_nothing_of_the_network():
    text = mw.explain(TREE, MESH)._repr_html_()
    page = Page(text)
    assert {tag for tag, _ in page.tags}.isdisjoint(
        {"script", "link", "img", "iframe", "image", "use", "object", "embed", "audio", "video"}
    )
    for _, attributes in page.tags:
        assert {"src", "href", "xlink:href", "srcset", "data"}.isdisjoint(attributes)
        for name, value in attributes.items():
            assert name == "xmlns" or "//" not in (value or "")
    assert "url(" not in text and "@import" not in text


def test_the_page_escapes_paths():
    text = mw.explain({"<b>&": sds(64, 64)}, MESH)._repr_html_()
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text


def test_the_page_draws_each_kind_of_array_once_and_few_of_them():
    same = mw.explain({f"w{place}": sds(128, 128) for place in range(50)}, MESH)._repr_html_()
    assert same.count("<svg") == 1
    many = {f"w{place}": sds(1024, 8 * place) for place in range(4, 50)}
    assert mw.explain(many, MESH)._repr_html_().count("<svg") == 6


def test_empty_arrays_do_not_break_the_page():
    Page(mw.explain({"a": sds(0, 8), "b": sds(8, 0, 4, 2), "c": sds(0)}, MESH)._repr_html_())


@pytest.mark.parametrize(
    ("shape", "local", "panels", "lines"),
    [
        ((4096,), (512,), 1, 7),
        ((64, 64), (16, 32), 1, 3 + 1),
        ((64, 64), (64, 64), 1, 0),
        ((8, 64, 64), (2, 64, 32), 4, 4 * 1),
        ((2, 8, 64, 64), (1, 2, 32, 64), 8, 8 * 1),
        ((3, 2, 8, 64, 64), (3, 1, 2, 32, 64), 8, 8 * 1),
        ((8192, 64), (1, 64), 1, 15),
        ((8192, 64, 64), (1, 64, 64), 8, 0),
    ],
)
def test_a_drawing_has_a_line_per_cut_and_a_panel_per_piece(shape, local, panels, lines):
    page = Page(cut_picture(shape, local))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("rect") == panels + 1  # one of them is the first device's piece
    drawn = "".join(attributes["d"] for tag, attributes in page.tags if tag == "path")
    assert drawn.count("M") == lines
    boxes = [attributes for tag, attributes in page.tags if tag == "rect"]
    assert all(float(box["width"]) > 0 and float(box["height"]) > 0 for box in boxes)


def test_json_says_everything_in_plain_values():
    report = mw.explain({"w": sds(64, 256), "s": sds(7)}, MESH, {"w": P(("fsdp", "tp")), "s": P()})
    assert json.loads(json.dumps(report.to_json())) == {
        "mesh": {"fsdp": 4, "tp": 2},
        "devices": 8,
        "bytes": 65536 + 28,
        "device_bytes": 8192 + 28,
        "worst_device_bytes": 8192 + 28,
        "arrays": [
            {
                "path": "s",
                "array": "f32[7]",
                "shape": [7],
                "shard_shape": [7],
                "spec": [],
                "bytes": 28,
                "device_bytes": 28,
                "copies": 8,
                "replicated": True,
            },
            {
                "path": "w",
                "array": "f32[64@(fsdp,tp),256]",
                "shape": [64, 256],
                "shard_shape": [8, 256],
                "spec": [["fsdp", "tp"]],
                "bytes": 65536,
                "device_bytes": 8192,
                "copies": 1,
                "replicated": False,
            },
        ],
    }


def test_json_takes_keys_and_numpy_shapes():
    tree = {"k": jax.random.split(jax.random.key(0), 64), "n": np.ones((4, 4))}
    found = json.loads(json.dumps(mw.explain(tree, MESH, min_shard_bytes=0).to_json()))
    assert re.fullmatch(r"key<\w+>\[64.*\]", found["arrays"][0]["array"])


def test_what_does_not_fit_is_refused_here_too():
    with pytest.raises(
        mw.errors.PartitionError, match=r"explain: 1 problem.*\n  w: dim 0 has size 6"
    ):
        mw.explain({"w": sds(6, 8)}, MESH, P("fsdp"))
    with pytest.raises(mw.errors.PartitionError, match="First difference: 'w' has no spec"):
        mw.explain({"w": sds(6, 8)}, MESH, {})


def test_reprs_stay_short_however_large_the_value_is():
    tree = {f"a{'b' * 300}{place}": sds(*[8] * 20) for place in range(300)}
    report = mw.explain(tree, MESH, unmatched="replicate", rules=[])
    options = Options(rules=[("*" * 100, ("fsdp",))] * 1000, unmatched="replicate")
    for value in (report, report.rows[0], options, Options()):
        assert len(repr(value)) <= 200
    assert repr(report).startswith("<PartitionReport 300 arrays on fsdp:4, tp:2 (8 devices): ")
    row = mw.explain({"w": sds(64, 64)}, MESH, P(("fsdp", "tp"))).rows[0]
    assert repr(row) == "<LeafRow w: f32[64@(fsdp,tp),64]>"
    assert repr(Options(uneven="replicate")) == "<Options uneven='replicate'>"


def test_the_page_says_how_many_arrays_it_leaves_out():
    page = mw.explain({f"w{place:04}": sds(8) for place in range(300)}, MESH)._repr_html_()
    assert "... and 100 more arrays" in page


def test_a_tree_with_none_for_its_mesh_is_refused():
    with pytest.raises(mw.errors.PartitionError, match=r"^mesh: None is not a jax.sharding.Mesh"):
        mw.explain({"w": sds(8)}, None)


def test_explain_says_so_when_mesh_and_tree_are_swapped():
    mesh = mw.mesh("fsdp:8")
    for second in ({"w": np.ones((64, 64), "float32")}, mesh):
        with pytest.raises(
            mw.errors.MeshError, match=r"first of two arguments is a mesh.*explain\(tree, mesh\)"
        ):
            mw.explain(mesh, second)


def test_explain_names_what_is_missing_or_misspelt():
    tree = {"w": np.ones((64, 64))}
    for arguments in ({}, {"rules": []}):
        with pytest.raises(mw.errors.MeshError, match=r"give a mesh: explain\(tree, mesh\)"):
            mw.explain(tree, **arguments)
    with pytest.raises(
        mw.errors.MeshError, match=r"no option 'intensty'. Did you mean 'intensity'"
    ):
        mw.explain("dp:8", on="v5e:4x2", intensty={"dp": 3})


def test_a_table_whose_rows_cannot_be_cut_is_told():
    mesh = mw.abstract_mesh("fsdp:8, tp:8")
    table = jax.ShapeDtypeStruct((50257, 768), "float32")
    kernel = jax.ShapeDtypeStruct((50257, 768), "float32")
    tree = {"wte": {"embedding": table}, "opt": {"wte": {"embedding": table}}, "mlp": kernel}
    lines = str(mw.explain(tree, mesh)).splitlines()
    assert lines[-1] == (
        "wte/embedding: its 50,257 rows are not divisible, so its columns are sharded, and "
        "activations are exchanged. Pad it to 50,304 rows."
    )
    assert sum("not divisible" in line for line in lines) == 1
    empty = jax.ShapeDtypeStruct((50257, 0), "float32")
    assert "Pad it" not in str(mw.explain({"wte": {"embedding": empty}}, mesh))
    padded = jax.ShapeDtypeStruct((50304, 768), "float32")
    assert "Pad it" not in str(mw.explain({"wte": {"embedding": padded}}, mesh))


def test_weights_that_no_axis_divides_are_told():
    mesh = mw.abstract_mesh("dp:2, fsdp:4, tp:2")
    odd, moments = (jax.ShapeDtypeStruct((1003, 509), "float32") for _ in range(2))
    stack = jax.ShapeDtypeStruct((8, 129, 129), "float32")
    small = jax.ShapeDtypeStruct((101, 101), "float32")
    even = jax.ShapeDtypeStruct((1003, 512), "float32")
    tree = {"layers": {"w": stack}, "head": odd, "mu": {"head": moments}, "norm": small}
    lines = str(mw.explain({**tree, "even": even}, mesh)).splitlines()
    assert [line for line in lines if "divide" in line] == [
        "head: fsdp:4, tp:2 divide no dim of (1003, 509), so every device holds all of it. "
        "Pad dim 0 to 1,008 to cut it in 8.",
        "layers/w: fsdp:4, tp:2 divide no dim of (8, 129, 129) but the first, so every device "
        "holds all of it. Pad dim 1 to 136 to cut it in 8.",
    ]
    many = {f"w{n}": jax.ShapeDtypeStruct((999, 1001 + 2 * n), "float32") for n in range(6)}
    assert "and arrays of 3 more shapes that no axis divides" in str(mw.explain(many, mesh))
    # What rules keep whole could be cut: that is the caller's choice.
    by_rules = mw.explain({"even": even}, mesh, rules=[("even", None)])
    assert "divide" not in str(by_rules)
