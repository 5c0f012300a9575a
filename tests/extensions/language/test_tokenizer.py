"""tokenizer.py: text to numbers and back, in pieces, for files and for bytes."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tokenizers import OF_BERT, TEXT, train_tokenizer
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer


@pytest.fixture(params=["file", "bytes"])
def words(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """Return a tokenizer of each kind."""
    return open_tokenizer(
        train_tokenizer(tmp_path / "tokenizer.json") if request.param == "file" else None
    )


def test_a_text_comes_back(words: Tokenizer) -> None:
    """Numbers are below the size of the vocabulary, none is special,
    and no text is cut or padded.
    """
    ids, short = words.encode([TEXT, "be"])
    assert "".join(words.decode(iter(ids.tolist()))) == TEXT
    assert "".join(words.decode(iter(short.tolist()))) == "be"
    assert 0 <= ids.min() <= ids.max() < words.vocab_size
    assert not {*ids.tolist(), *short.tolist()} & {*words.special_tokens.values()}


def test_text_comes_as_letters_are_whole(words: Tokenizer) -> None:
    """A letter of several numbers comes with its last one,
    and what came before it is not held back.
    """
    (ids,) = words.encode(["be\U0001f680!"])
    pieces = list(words.decode(iter(ids.tolist())))
    assert len(pieces) == len(ids) > 3
    assert [piece for piece in pieces if piece][-2:] == ["\U0001f680", "!"]
    assert pieces[0] and "" in pieces


def test_half_a_letter_at_the_end_is_shown() -> None:
    """Bytes that end inside a letter end with the sign for an unknown one."""
    assert "".join(ByteTokenizer().decode(iter([0x78, 0xC3]))) == "x\N{REPLACEMENT CHARACTER}"


def test_a_text_that_spells_a_special_token_is_text(tmp_path: Path) -> None:
    """Else a text could end its own document."""
    words = open_tokenizer(train_tokenizer(tmp_path / "tokenizer.json"))
    (ids,) = words.encode(["be<|endoftext|>"])
    assert words.special_tokens == {"end_of_text": 0} and 0 not in ids


def test_special_tokens_are_known_by_name(tmp_path: Path) -> None:
    """BERT's names, and a name that is given."""
    path = train_tokenizer(tmp_path / "tokenizer.json", OF_BERT)
    assert open_tokenizer(path).special_tokens == {"end_of_text": 3, "begin": 2, "mask": 4}
    assert open_tokenizer(path, "[UNK]").special_tokens["end_of_text"] == 1


def test_no_utf8_text_has_the_special_bytes() -> None:
    """So a vocabulary of bytes needs no more numbers than 256."""
    special = [*ByteTokenizer.special_tokens.values()]
    assert len({*special}) == len(special) and max(special) < 256
    for byte in special:
        for text in (
            bytes([byte]),
            bytes([0xF0, byte, 0x80, 0x80]),
            bytes([byte, 0x80, 0x80, 0x80]),
        ):
            with pytest.raises(UnicodeDecodeError):
                text.decode()


def test_a_file_that_is_none_is_explained(tmp_path: Path) -> None:
    """The error names the file; a tokenizer without a known end of text asks for its name."""
    (tmp_path / "a.json").write_text("{}")
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=r"a\.json is no tokenizer\.json of the tokenizers library"):
        open_tokenizer(tmp_path / "a.json")
    with pytest.raises(
        ConfigError,
        match=r"has no token <\|endoftext\|> or .* which ends a document.*end_of_text=TOKEN",
    ):
        open_tokenizer(train_tokenizer(tmp_path / "b.json", ("<other>",)))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    own = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "tokenizers":
            raise ImportError(name)
        return own(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'trainkit\[transformers\]'"):
        open_tokenizer(tmp_path / "tokenizer.json")
