"""token_writer.py and token_files.py:
text files as numbers, whole or not at all, and what is read of them.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.tokenizers import TEXT, train_tokenizer
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language import token_writer
from trainkit.extensions.language.token_files import TokenFolder, Tokens, open_tokens
from trainkit.extensions.language.token_writer import write_tokens
from trainkit.extensions.language.tokenizer import open_tokenizer

END = 0xFF


def everything(folder: TokenFolder) -> list[int]:
    """Return all numbers of a folder, in order."""
    return [*folder.train[:].tolist(), *folder.val[:].tolist()]


def documents(folder: TokenFolder) -> list[bytes]:
    """Return the documents of a folder of bytes."""
    return bytes(everything(folder)).split(bytes([END]))


def test_documents_follow_one_another(tmp_path: Path) -> None:
    """A .txt is a document, and each line of a .jsonl;
    each ends with the end-of-text token, empty files leave none.
    """
    texts = tmp_path / "texts" / "inner"
    texts.mkdir(parents=True)
    (texts / "a.txt").write_text("one\ntwo")
    (texts.parent / "b.txt").write_text("")
    (texts / "c.jsonl").write_text('{"text": "three"}\n\n{"text": "four\\n", "other": 1}\n')
    (texts / "d.md").write_text("no text of these kinds")
    folder = write_tokens(tmp_path / "texts", tmp_path / "tokens", val=0.25)
    assert sorted(documents(folder)) == [b"", b"four\n", b"one\ntwo", b"three"]
    assert everything(folder)[-1] == END
    assert (len(folder.train), len(folder.val)) == (15, 5)  # of 17 bytes and 3 ends
    about = json.loads((tmp_path / "tokens/tokens.json").read_text())
    assert (about["dtype"], about["documents"], about["tokenizer"]) == ("uint16", 3, None)


@pytest.mark.parametrize("piece", [1 << 16, 16, 5])
def test_a_long_text_is_read_in_pieces(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters that a piece's end cuts are whole, and nothing is lost or doubled."""
    monkeypatch.setattr(token_writer, "_PIECE", piece)
    monkeypatch.setattr(token_writer, "_BATCH", 40)
    text = TEXT * 3 + "\u20ac" * 20
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    seen: list[tuple[int, int]] = []
    folder = write_tokens(
        tmp_path / "a.txt", tmp_path / "tokens", moved=lambda *at: seen.append(at)
    )
    assert documents(folder) == [text.encode(), b""]
    assert seen[-1] == (len(text.encode()), len(text.encode()) + 1) and seen == sorted(seen)
    assert len(seen) > 5 or piece == 1 << 16


def test_a_tokenizer_is_used_and_kept(tmp_path: Path) -> None:
    """The folder holds a copy that decodes its numbers."""
    train_tokenizer(tmp_path / "mine.json")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    folder = write_tokens(tmp_path / "a.txt", tmp_path / "tokens", tmp_path / "mine.json")
    assert folder.tokenizer is not None and folder.vocab_size > 257
    words = open_tokenizer(folder.tokenizer)
    assert "".join(words.decode(iter(everything(folder)))) == TEXT
    assert everything(folder)[-1] == folder.special_tokens["end_of_text"] == 0
    assert len(everything(folder)) < len(TEXT)


def test_what_is_held_out_is_of_all_parts(tmp_path: Path) -> None:
    """Files are shuffled, always in the same way, before the last ones are held out."""
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"{i:02}")
    first, again = (
        write_tokens(tmp_path, tmp_path.parent / name, val=0.25) for name in ("first", "again")
    )
    assert everything(first) == everything(again)
    held_out = sorted(
        int(text) for text in bytes(first.val[:].tolist()).split(bytes([END])) if text
    )
    assert len(held_out) == 10 and held_out[0] < 10 and held_out[-1] >= 30


def test_a_large_vocabulary_takes_four_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers above 65,535 are stored."""

    class Large:
        vocab_size, special_tokens = 70_000, {"end_of_text": 69_999}

        def encode(self, texts: list[str]) -> list[Any]:
            return [np.arange(65_530, 65_540) for _ in texts]

    monkeypatch.setattr(token_writer, "open_tokenizer", lambda *_: Large())
    (tmp_path / "a.txt").write_text("x")
    folder = write_tokens(tmp_path / "a.txt", tmp_path / "tokens", val=0.3)
    assert everything(folder) == [*range(65_530, 65_540), 69_999]
    assert (tmp_path / "tokens/val.bin").stat().st_size == 4 * len(folder.val) == 12


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.txt",
            b"x" * 30 + b"\xe9 latin",
            r"a\.txt is no UTF-8 text: byte 30 cannot be decoded\. Convert it",
        ),
        ("a.txt", b"cut \xe2\x82", r"a\.txt is no UTF-8 text: byte 4 cannot"),
        ("a.txt", b"x", r"The texts have 2 tokens, too few to hold out val=0\.1"),
        ("a.txt", b"", r"The texts have 0 tokens"),
        ("a.jsonl", b'{"text": "x"}\n{"content": "y"}\n', r'a\.jsonl: line 2 has no "text"'),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', r'a\.jsonl: line 2 has no "text"'),
        ("a.jsonl", b"nothing\n", r"a\.jsonl: line 1 is no JSON"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', r"a\.jsonl: line 1 is no UTF-8 text"),
        ("a.jsonl", b'{"text": "\xe9"}\n', r"a\.jsonl: line 1 is no UTF-8 text"),
        ("a.md", b"x", r"a\.md is another file; give a \.txt"),
    ],
)
def test_a_text_that_cannot_be_read_leaves_nothing(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    """The error names the file and the place; there is no folder, and no draft of one."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        write_tokens(tmp_path / name, tmp_path / "tokens")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("content", "place"), [("abc\u20acdef".encode() + b"\xff", 9), (b"abc\xe2(def", 3)]
)
def test_a_place_of_no_letter_is_counted_over_pieces(
    content: bytes, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a piece's end cuts a letter before it, or begins what is none."""
    monkeypatch.setattr(token_writer, "_PIECE", 4)
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=f"byte {place} cannot"):
        write_tokens(tmp_path / "a.txt", tmp_path / "tokens")


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C, for one."""
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "a.txt", tmp_path / "tokens", moved=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    """Neither is one made below a folder that does not."""
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "tokens").mkdir()
    with pytest.raises(ConfigError, match="tokens', which exists. Give a new folder"):
        write_tokens(tmp_path / "a.txt", tmp_path / "tokens")
    with pytest.raises(ConfigError, match="which does not exist. Give a new folder"):
        write_tokens(tmp_path / "a.txt", tmp_path / "absent" / "tokens")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_slice_is_read_where_it_is_used(tmp_path: Path) -> None:
    """Tokens are pickled without their numbers, for workers that are started by spawn."""
    np.arange(1000, dtype="<u2").tofile(tmp_path / "a.bin")
    tokens = Tokens(tmp_path / "a.bin", "uint16", 1000)
    assert torch.equal(tokens[5:8], torch.tensor([5, 6, 7])) and len(tokens) == 1000
    sent = pickle.dumps(tokens)
    assert len(sent) < 600
    assert pickle.loads(sent)[998:1000].tolist() == [998, 999]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda folder: (folder / "tokens.json").unlink(),
            r"tokens is no folder of tokens: its tokens\.json cannot be read",
        ),
        (lambda folder: (folder / "tokens.json").write_text("[]"), "is no folder of tokens"),
        (
            lambda folder: (folder / "tokens.json").write_text('{"dtype": "int8"}'),
            "is no folder of tokens",
        ),
        (
            lambda folder: (folder / "val.bin").unlink(),
            r"val\.bin is missing; tokens\.json beside it promises",
        ),
        (
            lambda folder: (folder / "train.bin").write_bytes(b"xx"),
            r"train\.bin has 2 bytes; tokens\.json beside it promises",
        ),
    ],
)
def test_a_damaged_folder_is_refused(damage: Any, said: str, tmp_path: Path) -> None:
    """The error names the file, and how such a folder is made."""
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    write_tokens(tmp_path / "a.txt", tmp_path / "tokens")
    damage(tmp_path / "tokens")
    with pytest.raises(DataError, match=said):
        open_tokens(tmp_path / "tokens")
