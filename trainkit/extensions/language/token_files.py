"""A folder of tokens: a corpus as numbers, mapped into memory, so that any number of ranks share
one copy of it.

    tokens/
        train.bin, val.bin   numbers, little-endian, one document after the other; each ends with the end-of-text token
        tokens.json          their type and counts, the vocabulary's size, the special tokens
        tokenizer.json       what made them; without it a token is a byte

`python -m trainkit data tokens` writes it (token_writer.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.errors import DataError

DESCRIPTION = "tokens.json"
TOKENIZER = "tokenizer.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class Tokens:
    """The numbers of a .bin file; a slice of it is read when it is asked for.
    Pickled by name, for workers.
    """

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        """Take the file.

        Raises:
            DataError: it is missing, or has another size.
        """
        self.path = path
        self.dtype = dtype
        self.count = count
        size = path.stat().st_size if path.is_file() else -1
        expected = count * DTYPES[dtype].itemsize
        if size != expected:
            problem = "is missing" if size < 0 else f"has {size:,} bytes"
            raise DataError(f"{path} {problem}; {DESCRIPTION} beside it promises {expected:,}.")
        self._mapped: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, places: slice) -> Tensor:
        """Return the numbers of a slice, int64."""
        if self._mapped is None:
            self._mapped = np.memmap(self.path, DTYPES[self.dtype], "r")
        return torch.from_numpy(self._mapped[places].astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}


@dataclass(frozen=True)
class TokenFolder:
    """A folder of tokens.

    Attributes:
        root: the folder.
        train: the numbers to train on.
        val: those held out.
        vocab_size: all numbers are below it.
        special_tokens: "end_of_text", and "begin" and "mask" if the tokenizer has them.
        tokenizer: the file; None for bytes.
    """

    root: Path
    train: Tokens
    val: Tokens
    vocab_size: int
    special_tokens: Mapping[str, int]
    tokenizer: Path | None


def open_tokens(root: str | Path) -> TokenFolder:
    """Return the folder.

    Raises:
        DataError: it has no description, or files other than described.
    """
    folder = Path(root)
    try:
        about = json.loads((folder / DESCRIPTION).read_text())
        dtype = str(about["dtype"])
        vocab_size = int(about["vocab_size"])
        special = {kind: int(n) for kind, n in about["special_tokens"].items()}
        counts = [int(about[f"{part}_tokens"]) for part in ("train", "val")]
        DTYPES[dtype]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder} is no folder of tokens: its {DESCRIPTION} cannot be read"
            f" ({type(error).__name__}: {error}). Make one of text: python -m trainkit data tokens"
            f" TEXTS output={folder.name or 'tokens'}"
        ) from error
    train, val = (
        Tokens(folder / f"{part}.bin", dtype, n)
        for part, n in zip(("train", "val"), counts, strict=True)
    )
    tokenizer = folder / TOKENIZER if about.get("tokenizer") else None
    return TokenFolder(folder, train, val, vocab_size, special, tokenizer)
