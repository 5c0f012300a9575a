"""Writes a folder of tokens (token_files.py) of texts, in streams: memory does not grow with the
corpus.

write_tokens -> files_of -> pieces of 64 KiB -> encode, several at a time -> train.bin -> its end
becomes val.bin -> rename

A .txt is a document, and so is each line of a .jsonl, by its "text". A text longer than a piece is
cut at a line's end or a space, and no token spans a cut.
"""

from __future__ import annotations

import codecs
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.token_files import (
    DESCRIPTION,
    DTYPES,
    TOKENIZER,
    TokenFolder,
    open_tokens,
)
from trainkit.extensions.language.tokenizer import Tokenizer, open_tokenizer

KINDS = (".txt", ".jsonl")
# bytes of text: of a piece, and of those that are encoded together, on all cores
_PIECE = 1 << 16
_BATCH = 1 << 20
_COPIED = 1 << 24


class DocumentPart(NamedTuple):
    """A part of a document, whether it is the last one,
    and how many bytes of the file have been read.
    """

    text: str
    ends: bool
    num_read: int


def files_of(source: Path) -> list[Path]:
    """Return the texts of a folder, or a file itself; shuffled, so that what is held out is of all
    parts of the corpus.

    Raises:
        DataError: there are none.
    """
    files = (
        [source]
        if source.is_file()
        else sorted(path for path in source.rglob("*") if path.suffix in KINDS)
    )
    if not files or any(path.suffix not in KINDS for path in files):
        what = (
            "does not exist"
            if not source.exists()
            else "has no such file"
            if source.is_dir()
            else "is another file"
        )
        raise DataError(
            f'{source} {what}; give a .txt, a .jsonl of lines with a "text", or a folder of such'
            " files."
        )
    random.Random(0).shuffle(files)
    return files


def write_tokens(
    source: Path,
    output: Path,
    tokenizer: Path | None = None,
    *,
    val: float = 0.1,
    end_of_text: str | None = None,
    moved: Callable[[int, int], object] = lambda num_bytes, num_tokens: None,
) -> TokenFolder:
    """Write a folder of tokens, which appears as a whole or not at all, and return it.

    Args:
        source: a text, or a folder of texts.
        output: the folder; it must not exist.
        tokenizer: a tokenizer.json, which is copied into the folder; None for bytes.
        val: the share of the tokens that is held out: the last ones, of files in a shuffled order.
        end_of_text: the tokenizer's token between documents, if it has another name than the known
            ones.
        moved: receives the bytes read and the tokens written, as they grow.

    Raises:
        ConfigError: `output` exists or cannot be made, or the tokenizer cannot be used.
        DataError: a text is not UTF-8, there is too little of it, or the disk fails.
    """
    if output.exists() or not output.parent.is_dir():
        problem = "exists" if output.exists() else f"is in {output.parent}, which does not exist"
        raise ConfigError(
            f"output is '{output}', which {problem}. Give a new folder, in one that exists."
        )
    files = files_of(source)
    opened = open_tokenizer(tokenizer, end_of_text)
    draft = output.with_name(f".{output.name}-{os.getpid()}")
    try:
        draft.mkdir()
        about = _write(files, draft, opened, val, moved)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, draft / TOKENIZER)
        (draft / DESCRIPTION).write_text(
            json.dumps({**about, "tokenizer": tokenizer and TOKENIZER}, indent=2) + "\n"
        )
        draft.rename(output)
    except OSError as error:
        raise DataError(f"{output} was not written: {error}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return open_tokens(output)


def _write(
    files: list[Path],
    draft: Path,
    tokenizer: Tokenizer,
    val: float,
    moved: Callable[[int, int], object],
) -> dict[str, Any]:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    size = DTYPES[dtype].itemsize
    num_documents = 0
    num_tokens = 0
    num_before = 0
    ending = np.array(tokenizer.special_tokens["end_of_text"], DTYPES[dtype]).tobytes()
    with (draft / "train.bin").open("w+b") as train, (draft / "val.bin").open("wb") as held_out:
        for file in files:
            for batch in _batches(_pieces(file)):
                for piece, numbers in zip(
                    batch, tokenizer.encode([piece.text for piece in batch]), strict=True
                ):
                    train.write(
                        numbers.astype(DTYPES[dtype]).tobytes() + (ending if piece.ends else b"")
                    )
                    num_tokens += len(numbers) + piece.ends
                    num_documents += piece.ends
                moved(num_before + batch[-1].num_read, num_tokens)
            num_before += file.stat().st_size
        num_val = int(num_tokens * val)
        if num_val < 2 or num_tokens - num_val < 2:
            raise DataError(
                f"The texts have {num_tokens} tokens, too few to hold out val={val} of them. Give"
                " more text."
            )
        _move_end(train, held_out, num_val * size)
        for written in (train, held_out):
            written.flush()
            os.fsync(written.fileno())
    return {
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": dict(tokenizer.special_tokens),
        "train_tokens": num_tokens - num_val,
        "val_tokens": num_val,
        "documents": num_documents,
    }


def _move_end(file: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    start = file.seek(0, os.SEEK_END) - num_bytes
    file.seek(start)
    shutil.copyfileobj(file, target, _COPIED)
    file.truncate(start)


def _batches(pieces: Iterator[DocumentPart]) -> Iterator[list[DocumentPart]]:
    """Yield pieces by about a mebibyte."""
    batch = list[DocumentPart]()
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 1
        if size >= _BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _pieces(path: Path) -> Iterator[DocumentPart]:
    with path.open("rb") as file:
        yield from _of_lines(file, path) if path.suffix == ".jsonl" else _of_text(file, path)


def _of_text(file: BinaryIO, path: Path) -> Iterator[DocumentPart]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    num_read = 0
    while True:
        block = file.read(_PIECE)
        pending = len(decoder.getstate()[0])
        is_last = len(block) < _PIECE
        try:
            text = rest + decoder.decode(block, final=is_last)
        except UnicodeDecodeError as error:
            place = num_read - pending + error.start
            raise DataError(
                f"{path} is no UTF-8 text: byte {place:,} cannot be decoded. Convert it (iconv -t"
                " utf-8), or leave it out."
            ) from error
        num_read += len(block)
        if is_last:
            break
        cut = text.rfind("\n") + 1 or max(text.rfind(" "), 0) or len(text)
        yield DocumentPart(text[:cut], False, num_read)
        rest = text[cut:]
    if num_read:
        yield DocumentPart(text, True, num_read)


def _of_lines(file: BinaryIO, path: Path) -> Iterator[DocumentPart]:
    num_read = 0
    for number, line in enumerate(file, 1):
        num_read += len(line)
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row.get("text") if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise DataError(
                    f'{path}: line {number} has no "text"; each line must be an object with one.'
                )
            text.encode()  # JSON can spell halves of a letter
        except UnicodeError as error:
            raise DataError(
                f"{path}: line {number} is no UTF-8 text ({error}). Convert the file."
            ) from error
        except ValueError as error:
            raise DataError(f"{path}: line {number} is no JSON ({error}).") from error
        yield DocumentPart(text, True, num_read)
