"""Tokenizers as folders: transformers reads the tokens that trainkit trains on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.hf_data import Bytes
from tests.helpers.tokenizers import OF_BERT, TEXT, train_tokenizer
from trainkit.extensions.language.tokenizer import ByteTokenizer, FileTokenizer

transformers = pytest.importorskip("transformers")
TEXTS = [TEXT, "", " a  b\n", "def f():\n\treturn 's'", "".join(map(chr, range(0x250)))]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "qwen3"])
@pytest.mark.parametrize("special", [("<|endoftext|>",), ("</s>", "<s>"), OF_BERT])
def test_a_file_has_its_tokens_beside_any_model(
    kind: str, special: tuple[str, ...], tmp_path: Path
) -> None:
    """The numbers are those of training, and no token is added that the model lacks."""
    path = train_tokenizer(tmp_path / "tokenizer.json", special)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    ours = FileTokenizer(path)
    ours.save_pretrained(tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in TEXTS:
        (expected,) = ours.encode([text])
        assert theirs(text, add_special_tokens=False)["input_ids"] == expected.tolist()
    assert len(theirs) == ours.vocab_size
    if special is OF_BERT:
        assert theirs.mask_token_id == ours.special_tokens["mask"]
    else:
        assert theirs.eos_token_id == ours.special_tokens["end_of_text"]


def test_bytes_are_their_own_numbers(tmp_path: Path) -> None:
    """All texts come back; the end of a text and the mask are bytes that no text has."""
    ByteTokenizer().save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == [*text.encode()] and theirs.decode(ids) == text
    assert (len(theirs), theirs.eos_token_id, theirs.mask_token_id) == (256, 0xFF, 0xFD)


def test_bytes_of_a_model_of_transformers_begin_as_in_training(tmp_path: Path) -> None:
    """The token that begins a text is put before it."""
    Bytes().save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert all(theirs(text)["input_ids"] == Bytes()(text)["input_ids"] for text in TEXTS)
    assert (len(theirs), theirs.pad_token_id) == (Bytes.vocab_size, Bytes.eos_token_id)
