"""Letters: a model of letters whose logits a test gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Letters:
    """A ModelSource, and its Reader, of ASCII.

    Args:
        logits: returns those of the letter after a text, [128].
    """

    answers = False
    room: int | None = None
    device: Any = "cpu"
    can_batch = True

    def __init__(self, logits: Callable[[list[int]], Tensor]) -> None:
        self._logits = logits

    def reader(self) -> Letters:
        """Return what reads texts."""
        return self

    def read(self, texts: Sequence[list[int]]) -> Tensor:
        """Return the logits, [B, 128]."""
        return torch.stack([self._logits(text) for text in texts])

    def keep(self, places: Sequence[int]) -> None:
        """Continue with some texts: nothing is stored of them."""

    def encode(self, prompt: Any) -> list[int]:
        """Return a text's letters."""
        return [ord(letter) for letter in prompt]

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yield each letter."""
        return map(chr, tokens)

    def stops(self, is_chat: bool) -> set[int]:
        """Return no letters."""
        return set()

    def save_tokenizer(self, folder: Path) -> None:
        """Write nothing."""
