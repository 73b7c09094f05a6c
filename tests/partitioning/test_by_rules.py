"""Specs by rules: first match wins, and everything that does not fit is said at once."""

import json
import re
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.partitioning.rules import match_rules, read_rules
from meshwright.trees.walk import Leaf

MESH = mw.mesh("fsdp:4, tp:2")


def sds(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


TREE = {
    "embed": sds(64, 32),
    "layers": [{"attn": {"wq": sds(32, 32), "wo": sds(32, 32)}, "norm": sds(32)}],
    "step": sds(),
}


def test_the_first_rule_that_matches_wins():
    rules = [("wq", "tp"), ("attn/*", "fsdp"), ("**", None)]
    specs = mw.partition(TREE, MESH, rules=rules)
    assert specs["layers"][0]["attn"] == {"wq": P("tp"), "wo": P("fsdp")}
    assert specs["embed"] == specs["layers"][0]["norm"] == specs["step"] == P()
    message = (
        r"rule 'wq' is never reached: rule 'attn/\*' comes first and takes layers/0/attn/wq\. "
    )
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.partition(TREE, MESH, rules=[rules[1], rules[0], rules[2]])


def test_globs_and_regular_expressions_mix():
    rules = [
        ("/embed", ("tp", "fsdp")),
        (r"w[qkv]$", ("fsdp", "tp")),
        (re.compile("WO", re.IGNORECASE), ("tp", "fsdp")),
        ("layers/**/norm", None),
    ]
    specs = mw.partition(TREE, MESH, rules=rules)
    assert specs["embed"] == P("tp", "fsdp")
    assert specs["layers"][0]["attn"] == {"wq": P("fsdp", "tp"), "wo": P("tp", "fsdp")}


@pytest.mark.parametrize(
    ("written", "spec"),
    [
        (None, P()),
        ("tp", P("tp")),
        (["fsdp", "tp"], P("fsdp", "tp")),
        (("fsdp", None), P("fsdp")),
        ([None, ["fsdp", "tp"]], P(None, ("fsdp", "tp"))),
        (P(None, "tp"), P(None, "tp")),
        ([], P()),
    ],
    ids=str,
)
def test_a_spec_may_be_written_in_many_ways(written, spec):
    assert mw.partition({"w": sds(64, 64)}, MESH, rules={"w": written})["w"] == spec


def test_rules_survive_a_file():
    rules = [["wq", ["fsdp", "tp"]], ["embed", [["fsdp", "tp"], None]], ["**", None]]
    read = json.loads(json.dumps(rules))
    assert mw.partition(TREE, MESH, rules=read) == mw.partition(TREE, MESH, rules=rules)
    as_dict = json.loads(json.dumps(dict(rules)))
    assert mw.partition(TREE, MESH, rules=as_dict) == mw.partition(TREE, MESH, rules=rules)


def test_leaves_that_no_rule_matches_are_all_named():
    with pytest.raises(mw.errors.PartitionError, match="partition: 3 problems") as e:
        mw.partition(TREE, MESH, rules=[("embed", "tp")])
    for path, shape in [("attn/wq", "(32, 32)"), ("attn/wo", "(32, 32)"), ("norm", "(32,)")]:
        line = f"layers/0/{path}: {shape} matches no rule. Add one, e.g. ('**', None), or pass "
        assert line + "unmatched='replicate' or 'shape'." in str(e.value)
    assert "step" not in str(e.value)  # a scalar can only be whole


def test_unmatched_leaves_stay_whole_or_go_by_shape_when_asked():
    tree = {"a": sds(1024, 4096), "b": sds(1024, 4096)}
    whole = mw.partition(tree, MESH, rules={"a": "tp"}, unmatched="replicate")
    assert whole == {"a": P("tp"), "b": P()}
    shaped = mw.partition(tree, MESH, rules={"a": "tp"}, unmatched="shape")
    assert shaped == {"a": P("tp"), "b": P("fsdp", "tp")}


def test_a_rule_that_is_never_used_is_reported_unless_allowed():
    rules = [("**", None), ("embed", "tp"), (re.compile("ghost"), "tp")]
    with pytest.raises(mw.errors.PartitionError, match="2 problems") as caught:
        mw.partition(TREE, MESH, rules=rules)
    assert "rule 'embed' is never reached: rule '**' comes first and takes embed. Move it up, " in (
        str(caught.value)
    )
    assert "rule 'ghost' matches no leaf" in str(caught.value)
    assert mw.partition(TREE, MESH, rules=rules, unused="allow")["embed"] == P()


def test_all_problems_come_at_once_with_path_dim_sizes_axes_and_fix():
    tree = {"a": sds(6, 8), "b": sds(8, 8), "c": sds(8, 8), "d": sds(8, 8), "lost": sds(3)}
    rules = {
        "a": ("fsdp", "tp"),
        "b": ("fdsp", None),
        "c": ("tp", None, "fsdp"),
        "d": ("tp", "tp"),
        "ghost": None,
    }
    with pytest.raises(mw.errors.PartitionError, match="6 problems") as caught:
        mw.partition(tree, MESH, rules=rules)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        "rule 'ghost' matches no leaf. Fix or remove it, or pass unused='allow'.",
        "lost: (3,) matches no rule. Add one, e.g. ('**', None), or pass unmatched='replicate' or "
        "'shape'.",
        "a: dim 0 has size 6, not divisible by 4 (axes fsdp). Pad to 8, use another axis, or "
        "pass uneven='replicate' to partition.",
        "b: dim 0: no mesh axis 'fdsp' in fsdp, tp. Did you mean 'fsdp'?",
        "c: P('tp', None, 'fsdp') has 3 entries for an array with 2 dims (8, 8). Drop 1.",
        "d: P('tp', 'tp') uses axis 'tp' twice. Use it on one dim.",
    ]


def test_uneven_dims_stay_whole_when_asked():
    tree = {"a": sds(6, 8), "b": sds(6, 8), "c": sds(8, 6), "d": sds(6, 7)}
    specs = mw.partition(tree, MESH, rules=[("**", ("fsdp", "tp"))], uneven="replicate")
    assert specs == {"a": P(None, "tp"), "b": P(None, "tp"), "c": P("fsdp", "tp"), "d": P()}


def test_of_several_uneven_axes_those_that_divide_are_kept_in_order():
    mesh = mw.abstract_mesh("dp:2, fsdp:2, tp:4")
    tree = {"a": sds(6), "b": sds(12), "c": sds(8), "d": sds(7)}
    specs = mw.partition(tree, mesh, rules=[("**", [["fsdp", "dp", "tp"]])], uneven="replicate")
    assert specs == {"a": P("fsdp"), "b": P(("fsdp", "dp")), "c": P(("fsdp", "dp")), "d": P()}


@pytest.mark.parametrize("spec", [("fsdp", "tp", None), ["fsdp", None, None], P(None, None, None)])
def test_a_spec_longer_than_the_array_is_refused_even_if_the_rest_is_whole(spec):
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"w: .* has 3 entries for an array with 2 dims \(64, 64\)\. Drop 1",
    ):
        mw.partition({"w": sds(64, 64)}, MESH, rules={"w": spec})


def test_uneven_leaves_of_one_shape_are_all_made_whole():
    tree = {"a": sds(6), "b": sds(6)}
    specs = mw.partition(tree, MESH, rules=[("**", "fsdp")], uneven="replicate")
    assert specs == {"a": P(), "b": P()}


def test_what_uneven_forgives_is_not_reported_beside_other_problems():
    tree = {"a": sds(6, 8), "b": sds(6, 8)}
    with pytest.raises(mw.errors.PartitionError, match="2 problems") as caught:
        mw.partition(tree, MESH, rules=[("**", ("fsdp", "nope"))], uneven="replicate")
    assert "divisible" not in str(caught.value)


def test_two_axes_on_a_dim_must_divide_it_together():
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"w: dim 1 has size 12, not divisible by 8 \(axes fsdp, tp\)\. Pad",
    ):
        mw.partition({"w": sds(4, 12)}, MESH, rules={"w": (None, ("fsdp", "tp"))})


def test_zero_divides_by_everything():
    assert mw.partition({"w": sds(0, 8)}, MESH, rules={"w": "fsdp"})["w"] == P("fsdp")


def test_without_rules_every_array_must_be_taken_care_of():
    with pytest.raises(mw.errors.PartitionError, match=r"w: \(8, 8\) matches no rule"):
        mw.partition({"w": sds(8, 8)}, MESH, rules=[])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("attn", r"^rules: 'attn' is not a table\. Pass pairs such as"),
        (7, r"^rules: 7 is not a table"),
        ([("w",)], r"^rules: entry 0, \('w',\), is not a \(pattern, spec\) pair"),
        (["wq"], r"^rules: entry 0, 'wq', is not a \(pattern, spec\) pair"),
        ([("w", 3)], r"^rules: entry 0, 'w': 3 is not a spec, e\.g\. \('fsdp', None, 'tp'\)"),
        ([("w", ("tp", 3))], r"^rules: entry 0, 'w': 3 is not an axis name, a list of them, or N"),
        ([("w", [["tp", 3]])], r"^rules: entry 0, 'w': \['tp', 3\] is not an axis name"),
        ([("w", "")], r"^rules: entry 0, 'w': '' is not a spec"),
        ([("w", [[]])], r"^rules: entry 0, 'w': \[\] is not an axis name"),
        ([("w", [""])], r"^rules: entry 0, 'w': '' is not an axis name"),
        ([("w", [["tp", None]])], r"^rules: entry 0, 'w': \['tp', None\] is not an axis name"),
        ([(3, None)], r"^pattern 3 is not a string"),
        ([(["w"], None)], r"^pattern \['w'\] is not a string"),
        ([("[", None)], r"^pattern '\[' does not compile"),
    ],
)
def test_bad_rules_say_which_entry(rules, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.partition({"w": sds(8, 8)}, MESH, rules=rules)


@pytest.mark.parametrize("option", ["uneven", "unmatched", "unused"])
def test_unknown_words_list_the_known_ones(option):
    known = {
        "uneven": "error, replicate",
        "unmatched": "error, replicate, shape",
        "unused": "error, allow",
    }
    with pytest.raises(
        mw.errors.PartitionError, match=rf"^{option}: 'maybe' is not one of {known[option]}\.$"
    ):
        mw.partition({"w": sds(8, 8)}, MESH, rules=[("**", None)], **{option: "maybe"})


def test_rules_and_logical_axes_do_not_mix():
    with pytest.raises(mw.errors.PartitionError, match=r"^pass rules or logical, not both\.$"):
        mw.partition({"w": sds(8, 8)}, MESH, rules=[], logical={})


def test_rules_place_arrays_too():
    tree = {"w": np.arange(64, dtype="float32").reshape(8, 8)}
    placed = mw.shard(tree, MESH, rules={"w": ("tp", "fsdp")})
    assert placed["w"].sharding.spec == P("tp", "fsdp")
    np.testing.assert_array_equal(placed["w"], tree["w"])


def test_the_value_of_a_flax_variable_goes_by_the_variable_s_name():
    from flax import nnx

    state = nnx.state(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    for rule in ("kernel", "**/kernel", "kernel$", "kernel/value", "kernel/**"):
        specs = mw.partition(state, MESH, rules=[(rule, ("fsdp", "tp")), ("bias", None)])
        assert specs["kernel"].get_value() == P("fsdp", "tp")


def test_many_leaves_and_many_rules_take_little_time():
    words = [
        "attn/q",
        "attn/k",
        "attn/v",
        "attn/o",
        "mlp/up",
        "mlp/gate",
        "mlp/down",
        "a",
        "b",
        "c",
    ]
    leaves = [
        Leaf(f"model/layers/{layer}/{word}/kernel", 0, (64, 64), np.dtype("float32"), None)
        for layer in range(5000)
        for word in words
    ]
    rules = [(f"other{place}/**/kernel", None) for place in range(200)]
    rules += [(f"{word}/kernel", "tp") for word in words]
    start = time.process_time()
    specs, _ = match_rules(leaves, read_rules(rules))
    assert time.process_time() - start < 1
    assert specs == [P("tp")] * len(leaves)


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("rules", {"rules": "w"}),
        ("rules", {"rules": [("w",)]}),
        ("rules", {"rules": [("(", None)]}),
        ("rules", {"rules": [("w", 7)]}),
        ("rules", {"rules": [("w", [3])]}),
        ("rules", {"rules": [("**", "nope")]}),
        ("rules", {"rules": {}, "logical": {}}),
        ("unused", {"rules": [("**", None), ("ghost", None)]}),
        ("unmatched", {"rules": {}}),
        ("unmatched", {"unmatched": "whole"}),
        ("unused", {"unused": "ignore"}),
        ("uneven", {"uneven": "pad"}),
        ("logical", {"logical": "embed"}),
        ("logical", {"logical": [("embed",)]}),
        ("logical", {"logical": {"embed": 3}}),
        ("logical", {"logical": [("a", None), ("a", None)]}),
        ("logical", {"logical": {}, "names": {"w": ("embed", None)}}),
        ("unmatched", {"logical": {}}),
        ("names", {"names": {"w": (None, None)}}),
        ("names", {"logical": {}, "names": {"w": (None, None), "gone": ()}}),
        ("axes", {"axes": "fsdp"}),
        ("axes", {"axes": ["nope"]}),
        ("axes", {"axes": [["fsdp"]]}),
        ("axes", {"axes": ["fsdp", "fsdp"]}),
        ("axes", {"rules": {}, "axes": ["fsdp"]}),
        ("min_shard_bytes", {"min_shard_bytes": -1}),
        ("min_shard_bytes", {"min_shard_bytes": "all"}),
        ("stacked", {"stacked": 3}),
        ("stacked", {"stacked": "ghost"}),
        ("stacked", {"stacked": "("}),
        # Problems of two kinds are not about one option.
        (None, {"rules": [("ghost", None)]}),
    ],
)
def test_errors_carry_the_option_they_are_about(option, options):
    with pytest.raises(mw.errors.PartitionError) as caught:
        mw.partition({"w": sds(64, 64)}, MESH, **options)
    assert caught.value.option == option
