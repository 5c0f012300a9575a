"""preferences.py: TRL's formats of pairs, rows that are refused, and pairs that are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.sft_data import byte_tokenizer
from trainkit.errors import DataError
from trainkit.extensions.language.preferences import AnswerPair, encode_pairs, pair_of, read_pairs

ASKED = [{"role": "user", "content": "1 + 1?"}]
TWO = [{"role": "assistant", "content": "2"}]
THREE = [{"role": "assistant", "content": "3"}]
ROW = {"prompt": ASKED, "chosen": TWO, "rejected": THREE}


def test_a_file_of_any_kind_gives_the_same_pairs(tmp_path: Path) -> None:
    """A .jsonl, a .parquet and a folder of datasets."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n")
    held = datasets.Dataset.from_list([ROW])
    held.to_parquet(str(tmp_path / "a.parquet"))
    held.save_to_disk(str(tmp_path / "folder"))
    for name in ("a.jsonl", "a.parquet", "folder"):
        place = f"{tmp_path / name}, row 1"
        assert read_pairs(tmp_path / name) == [AnswerPair(ASKED, TWO, THREE, None, place)]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": ASKED + TWO, "rejected": ASKED + THREE},
        {"prompt": "1 + 1?", "chosen": ASKED + TWO, "rejected": ASKED + THREE},
        ROW | {"id": 7},
    ],
)
def test_a_prompt_may_be_what_both_begin_with(row: dict[str, Any]) -> None:
    """Also if its text stands in a column beside; a column of no meaning is left out."""
    assert pair_of(row, "here") == AnswerPair(ASKED, TWO, THREE, None, "here")


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Q: 1+1 A: 2", "Q: 1+1 A: 3", "Q: 1+1 A:"),  # a space belongs to the next text
        ("ab", "abc", "a"),
    ],
)
def test_the_prompt_of_texts_is_their_beginning(chosen: str, rejected: str, prompt: str) -> None:
    """As TRL's extract_prompt has it."""
    result = pair_of({"chosen": chosen, "rejected": rejected}, "here")
    assert result.prompt == prompt
    assert (prompt + result.chosen, prompt + result.rejected) == (chosen, rejected)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "x", "chosen": "y"}, "no pair of 'chosen' and 'rejected'; it has prompt, chos"),
        ({"messages": ASKED}, "it has messages. Conversations without .* data of conf=sft"),
        ([1], "it has list"),
        ({"chosen": TWO, "rejected": THREE}, "no prompt, and chosen and rejected share no begin"),
        ({"chosen": "yes", "rejected": "no"}, "no prompt, and chosen and rejected share no begin"),
        (ROW | {"chosen": "2"}, "chosen and rejected are a text and a list of messages"),
        (ROW | {"chosen": "2", "rejected": "3"}, "its prompt is a list of messages, and its answ"),
        (ROW | {"prompt": "1 + 1?"}, "no prompt, and|messages that begin otherwise"),
        (ROW | {"prompt": []}, "here, prompt: its messages are empty"),
        (
            ROW | {"rejected": [{"role": "gpt", "content": "3"}]},
            "here, rejected, message 1 has the",
        ),
        (ROW | {"chat_template_kwargs": [1]}, "chat_template_kwargs is of type list; it must be"),
        (
            {"prompt": "2", "chosen": "a", "rejected": "b", "chat_template_kwargs": {"x": 1}},
            "has chat_template_kwargs, which have no effect on texts",
        ),
        (ROW | {"tools": "{"}, "its tools are a text that is not JSON"),
        (
            {"prompt": "2 + 2?", "chosen": ASKED + TWO, "rejected": ASKED + THREE},
            "a text as its prompt, and messages that begin otherwise",
        ),
    ],
)
def test_a_row_that_is_not_a_pair_is_named(row: Any, text: str) -> None:
    """The error names the row, its column, and what is legal."""
    with pytest.raises(DataError, match=text):
        pair_of(row, "here")


def test_a_rows_variables_reach_the_template() -> None:
    """With the prompt and with both answers, as in TRL."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ style }}" + tokenizer.chat_template
    row = pair_of(ROW | {"chat_template_kwargs": {"style": "short: "}}, "here")
    documents = encode_pairs([row], tokenizer, 99, "cut").documents
    for number in (0, 1):
        ids, labels = documents.document(number)
        assert tokenizer.decode(ids).startswith("short: <|im_start|>user")
        assert labels[0] < 0


def test_a_file_without_a_pair_is_refused(tmp_path: Path) -> None:
    """An empty one, and one of another kind."""
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="has no rows. A row is a preference pair"):
        read_pairs(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="give a .jsonl or a .parquet of preference pairs"):
        read_pairs(tmp_path / "a.csv")


def pair(prompt: str, chosen: str, rejected: str) -> AnswerPair:
    """Return a pair of texts."""
    return AnswerPair(prompt, chosen, rejected, None, "here")


def test_answers_are_predicted_with_their_end() -> None:
    """All that follows the prompt, of texts with the token that ends a text."""
    tokenizer = byte_tokenizer()
    encoded = encode_pairs([pair("ab", "c", "de")], tokenizer, 9, "cut")
    for number, text in enumerate(("c", "de")):
        ids, labels = encoded.documents.document(number)
        assert tokenizer.decode(ids) == f"ab{text}<|im_end|>"
        assert tokenizer.decode(labels[labels >= 0]) == f"{text}<|im_end|>"


@pytest.mark.parametrize(
    ("too_long", "counts", "left"),
    [("cut", (3, 0, 1, 2), 2), ("leave_out", (0, 3, 0, 1), 1)],
)
def test_a_pair_that_is_too_long_follows_the_rule(
    too_long: Any, counts: tuple[int, ...], left: int
) -> None:
    """It loses its end or is left out; so is a pair of equal answers, also once they are cut, and one
    with a prompt that fills the row.
    """
    pairs = [
        pair("ab", "c", "d"),
        pair("ab", "c", "c"),
        pair("ab", "xyzxyz1", "zyx"),
        pair("ab", "xyzxyz1", "xyzxyz2"),
        pair("abcdef", "x", "y"),
    ]
    encoded = encode_pairs(pairs, byte_tokenizer(), 6, too_long)
    held = encoded.documents
    assert (held.num_cut, held.num_too_long, held.num_silent, encoded.num_equal) == counts
    assert len(encoded) == left
    assert max(held.lengths()) <= 6
    with pytest.raises(DataError, match="here has 10 tokens; data.max_length is 6. Raise it"):
        encode_pairs(pairs, byte_tokenizer(), 6, "refuse")


def test_a_prompt_that_is_rewritten_before_an_answer_is_counted() -> None:
    """The answer begins where the tokens differ, as TRL has it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"
    encoded = encode_pairs([AnswerPair(ASKED, TWO, THREE, None, "here")], tokenizer, 99, "cut")
    assert encoded.num_rewritten == 1
    _, labels = encoded.documents.document(0)
    assert tokenizer.decode(labels[labels >= 0]) == "2<|im_end|>\n"
