"""Tokenizers: text to numbers and back. A tokenizer.json of the tokenizers library (imported here
alone), or bytes.

open_tokenizer   a file, or None for bytes -> Tokenizer
Tokenizer        encode: texts to numbers; decode: numbers to text, as they come
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.tokenizer_folder import write_of_bytes, write_of_file

Numbers = NDArray[np.int64]
INSTALL = "pip install 'trainkit[transformers]'"
# Bytes that no UTF-8 text has (RFC 3629), so a vocabulary of bytes needs no more than 256 numbers.
_OF_BYTES = {"mask": 0xFD, "begin": 0xFE, "end_of_text": 0xFF}
# What the known families call them: GPT-2, Llama and T5, BERT, RoBERTa.
_NAMES = {
    "end_of_text": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"),
    "begin": ("[CLS]", "<s>"),
    "mask": ("[MASK]", "<mask>"),
}


class Tokenizer(Protocol):
    """Numbers of text."""

    @property
    def vocab_size(self) -> int:
        """Return a number that all are below."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Return those of "end_of_text", and of "begin" and "mask" if there are any."""

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        """Return the numbers of each text, without special tokens."""

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yield the text that each number completes ("" for a part of a letter), as it comes."""

    def save_pretrained(self, folder: Path) -> None:
        """Write it into a folder, for AutoTokenizer of transformers."""


class ByteTokenizer:
    """The bytes of a text in UTF-8."""

    vocab_size = 256
    special_tokens: Mapping[str, int] = _OF_BYTES

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        """See Tokenizer."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """See Tokenizer."""
        # a letter may be several bytes
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(bytes([token]))
        if rest := decoder.decode(b"", final=True):
            yield rest

    def save_pretrained(self, folder: Path) -> None:
        """See Tokenizer."""
        roles = {"mask_token": "[MASK]", "eos_token": "<|endoftext|>"}
        numbers = {"mask_token": _OF_BYTES["mask"], "eos_token": _OF_BYTES["end_of_text"]}
        write_of_bytes(folder, {role: (numbers[role], text) for role, text in roles.items()})


class FileTokenizer:
    """A tokenizer.json.

    Special tokens are numbers of their own only: a text that spells one is text. The file's
    truncation and padding are off.
    """

    def __init__(self, path: Path, end_of_text: str | None = None) -> None:
        """Read the file; `end_of_text` names its token between documents, if that has none of the
        known names.

        Raises:
            ConfigError: the tokenizers library is not installed, or the file lacks the token.
            DataError: the file is not one of that library.
        """
        try:
            import tokenizers
            from tokenizers.decoders import DecodeStream
        except ImportError as error:
            raise ConfigError(f"{path} needs the tokenizers library: {INSTALL}") from error
        try:
            self._own: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                f"{path} is no tokenizer.json of the tokenizers library: {error}"
            ) from error
        self._path, self._stream = path, DecodeStream
        self._own.no_truncation()
        self._own.no_padding()
        self._own.encode_special_tokens = True
        names = _NAMES if end_of_text is None else {**_NAMES, "end_of_text": (end_of_text,)}
        numbers = {
            kind: [self._own.token_to_id(name) for name in known] for kind, known in names.items()
        }
        self.special_tokens = {
            kind: token
            for kind, all_of in numbers.items()
            for token in all_of[::-1]
            if token is not None
        }
        if "end_of_text" not in self.special_tokens:
            raise ConfigError(
                f"{path} has no token {' or '.join(names['end_of_text'])}, which ends a document."
                " Name the one that does: end_of_text=TOKEN."
            )
        self.vocab_size = 1 + max(self._own.get_vocab(with_added_tokens=True).values())

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        """See Tokenizer."""
        encodings = self._own.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """See Tokenizer."""
        stream = self._stream(skip_special_tokens=True)
        for token in tokens:
            yield stream.step(self._own, token) or ""

    def save_pretrained(self, folder: Path) -> None:
        """See Tokenizer."""
        write_of_file(self._path, folder)


def open_tokenizer(path: str | Path | None, end_of_text: str | None = None) -> Tokenizer:
    """Return the tokenizer of a file, or bytes.

    Raises:
        ConfigError, DataError: see FileTokenizer.
    """
    return ByteTokenizer() if path is None else FileTokenizer(Path(path), end_of_text)
