"""Patterns over paths: globs by words, regular expressions by search."""

import fnmatch
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.partitioning.rules import PatternList, compile_pattern, matches


@pytest.mark.parametrize(
    ("pattern", "path", "hit"),
    [
        ("w", "w", True),
        ("w", "layers/0/w", True),
        ("w", "layers/0/ww", False),
        ("w", "w/scale", False),
        ("attn/w*", "layers/0/attn/wq", True),
        ("attn/w*", "layers/0/attn/inner/wq", False),
        ("attn/w?", "attn/wq", True),
        ("attn/w?", "attn/w", False),
        ("layers/*/kernel", "layers/0/kernel", True),
        ("layers/*/kernel", "layers/0/mlp/kernel", False),
        ("layers/**/kernel", "layers/0/mlp/kernel", True),
        ("layers/**/kernel", "layers/kernel", True),
        ("layers/**/kernel", "layerskernel", False),
        ("attn/**", "layers/0/attn/q/kernel", True),
        ("attn/**", "attn", True),
        ("attn/**", "attn_norm", False),
        ("attn/**", "attn_norm/scale", False),
        ("attn/**/**", "attn", True),
        ("**/w", "w", True),
        ("**/w", "a/b/w", True),
        ("**/w", "a/bw", False),
        ("**", "anything/at/all", True),
        ("**", "", True),
        ("*", "", True),
        ("/w", "w", True),
        ("/w", "layers/w", False),
        ("/layers/**", "layers/0/w", True),
        ("/layers/**", "old/layers/0/w", False),
        ("w.1", "wx1", False),
        ("w.1", "w.1", True),
        ("w-1", "w-1", True),
        ("a**b", "axxb", True),
        ("a**b", "a/b", False),
        ("*", "a//", True),
        ("*/b", "a//b", True),
        ("a/b", "a//b", False),
        # Regular expressions are searched anywhere.
        ("(wq|wk)$", "layers/0/attn/wq", True),
        ("(wq|wk)$", "layers/0/attn/wqx", False),
        ("attn/.*kernel", "layers/0/attn/q/kernel_1", True),
        (r"layers/\d+/w", "layers/12/w", True),
        ("^w", "layers/w", False),
        ("w[qk]", "attn/wk/lora", True),
        (re.compile("K"), "aKb", True),
        (re.compile("kernel", re.IGNORECASE), "KERNEL", True),
    ],
)
def test_pattern(pattern, path, hit):
    assert matches(pattern, path) is hit


@pytest.mark.parametrize("pattern", ["", None, 3, ["w"], {"w": 1}, b"w", re.compile(b"w")])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(
        mw.errors.PartitionError, match=r"^pattern .* is not a string or a compiled expression\.$"
    ):
        compile_pattern(pattern)


def test_a_broken_expression_says_why():
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"^pattern '\(wq' does not compile: missing \), .* position 0",
    ):
        compile_pattern("(wq")


def reference(pattern, path):
    """Word by word, every way to cut the path."""

    def ends(words, left):
        if not words:
            return not left
        if words[0] == "**":
            return any(ends(words[1:], left[at:]) for at in range(len(left) + 1))
        return bool(left) and fnmatch.fnmatchcase(left[0], words[0]) and ends(words[1:], left[1:])

    words, left = pattern.strip("/").split("/"), path.split("/")
    starts = [0] if pattern.startswith("/") else range(len(left) + 1)
    return any(ends(words, left[at:]) for at in starts)


word = st.text("ab_1", min_size=1, max_size=3)
slow = [
    ("/".join(["**", "a"] * 12) + "/b", "/".join(["a"] * 30)),
    ("*a" * 6 + "*b", "a" * 60),
    ("*a" * 30 + "*b", "a" * 5000),
    ("/".join(["**", "*a*a*"] * 20) + "/b", "/".join(["a" * 50] * 200)),
    ("/".join(["**", "*"] * 40) + "/b", "/".join(["a"] * 200)),
]


@pytest.mark.parametrize(("pattern", "path"), slow, ids=lambda text: text[:12])
def test_no_glob_tries_every_way_to_read_a_path(pattern, path):
    start = time.process_time()
    assert not matches(pattern, path)
    assert matches(pattern, f"{path}/b" if "/" in pattern else f"{path}b")
    assert time.process_time() - start < 1


glob_word = st.one_of(st.just("**"), st.text("ab_1*?", min_size=1, max_size=3))


@settings(deadline=None, derandomize=True, max_examples=500)
@given(
    st.booleans(),
    st.lists(glob_word, min_size=1, max_size=4),
    st.lists(word, min_size=1, max_size=5),
)
def test_globs_agree_with_matching_word_by_word(tied, words, path):
    pattern = "/" * tied + "/".join(words)
    assert matches(pattern, "/".join(path)) == reference(pattern, "/".join(path)), pattern


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text("ab.-_:@#1", min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_path_matches_itself(path):
    text = "/".join(path)
    assert matches(text, text)
    assert matches(text, f"before/{text}")
    assert not matches(f"/{text}", f"before/{text}")


numbered = st.text("ab019", min_size=1, max_size=3)
any_pattern = st.one_of(
    st.lists(st.one_of(st.just("**"), st.text("ab01*?", min_size=1, max_size=3)), min_size=1).map(
        "/".join
    ),
    st.sampled_from(["a$", "a[0-1]", r"\d/b", r"(?P<x>\d)(?P=x)", "a|b", re.compile("A1", re.I)]),
)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(
    st.lists(any_pattern, max_size=5),
    st.lists(st.lists(numbered, min_size=1, max_size=3).map("/".join), max_size=20),
)
def test_many_patterns_together_match_as_each_does_alone(patterns, paths):
    together = PatternList(patterns)
    for path in paths:
        hits = [place for place, pattern in enumerate(patterns) if matches(pattern, path)]
        assert together.matching(path) == hits
        assert together.first(path) == (hits[0] if hits else None)
