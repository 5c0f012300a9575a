"""data.urls: braces mean what they do in WebDataset, which has them of braceexpand, as bash."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.shards.index import urls_of
from trainkit.extensions.shards.store import ShardStore


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", "a"),
        ("{00..101}", " ".join(f"{number:03d}" for number in range(102))),
        ("{3..1}", "3 2 1"),
        ("{0..09}", "00 01 02 03 04 05 06 07 08 09"),
        ("{008..11}", "008 009 010 011"),
        ("{0..2}", "0 1 2"),
        ("{5..5}", "5"),
        ("{0..10..4}", "0 4 8"),
        ("{10..0..-5}", "10 5 0"),
        ("{1..3..0}", "1 2 3"),
        ("{-1..1}", "-1 0 1"),
        ("{-01..1}", "-01 000 001"),
        ("{a..c}", "a b c"),
        ("{c..A..14}", "c O A"),
        ("{Y..b}", "Y Z a b"),
        ("{0..1}/{a,b}-{1,2}", "0/a-1 0/a-2 0/b-1 0/b-2 1/a-1 1/a-2 1/b-1 1/b-2"),
        ("{a{1..2},b,c{x,{y,z}}}", "a1 a2 b cx cy cz"),
        ("x{,.gz}", "x x.gz"),
    ],
)
def test_braces_are_those_of_webdataset(pattern: str, expected: str) -> None:
    """Numbers up and down, with steps, zeros as wide as the longer end; letters; lists in lists."""
    assert urls_of(pattern, ShardStore(), "data.urls") == expected.split(" ")
    if importlib.util.find_spec("braceexpand") is not None:
        theirs = importlib.import_module("braceexpand").braceexpand(pattern)
        assert list(theirs) == expected.split(" ")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a{1..2", r"data\.urls is 'a\{1\.\.2'; each \{ needs its \}"),
        ("a1..2}", r"each \{ needs its \}"),
        ("{a,b}}", r"each \{ needs its \}"),
        ("{{a,b}", r"each \{ needs its \}"),
        (r"a\{1,2\}", "a backslash does not escape them"),
        (r"{a\,b,c}", "a backslash does not escape them"),
        ("{}", "braces hold numbers, letters or a list"),
        ("{1..}", "braces hold numbers, letters or a list"),
        ("{1..b}", "braces hold numbers, letters or a list"),
        ("{1..{2,3}}", "braces hold numbers, letters or a list"),
        ("{1,{x}}", r"data\.urls is '\{1,\{x\}\}'; braces hold numbers, letters or a list"),
        ("{1..2}{x}", "braces hold numbers, letters or a list"),
    ],
)
def test_other_braces_are_refused(pattern: str, said: str) -> None:
    """They would name files that do not exist, or none, in silence."""
    with pytest.raises(ConfigError, match=said):
        urls_of(["other.tar", pattern], ShardStore(), "data.urls")
