"""A small GPT on the bytes of text files: a pre-norm decoder (Radford et al. 2019), 256 tokens, no
tokenizer.

Its Task is that of all language models: recipes/language_model.py. Beside it: recipes/gpt2.py,
GPT-2 itself, whose form in transformers it has too, with another activation (recipes/gpt2_form.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainkit
from recipes.gpt2_form import GPT2Form

# a name of configs in older checkpoints
from recipes.language_model import LanguageModel as LanguageModel
from recipes.transformer import Attention
from trainkit.arguments import ExistingFile, ExistingFolder, Fraction, NonNegativeInt, PositiveInt
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.context.sequence import rows, whole_length

_BYTES = 256


class Block(nn.Module):
    """Causal attention and a wide layer, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, causal=True)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.wide(self.norm2(x_BTD))


class GPT(GPT2Form):
    """Tokens [B, T] in, logits of the next token [B, T, V] out; by default tokens are bytes.

    Args:
        context: the longest input, in tokens.
        width: features of each token.
        depth: number of blocks.
        heads: of attention; they divide `width`.
        dropout: share of activations dropped while training.
        vocab_size: V, the number of different tokens.
    """

    activation = "gelu"  # not tanh's approximation, which GPT-2's own weights have
    note_of_weights = (
        "weights          of GPT-2's form; read as this model's, whose GELU is that of the error"
        " function (transformers' gelu): GPT-2's own have gelu_new, as conf=gpt_124m"
    )

    def __init__(
        self,
        context: PositiveInt = 128,
        width: PositiveInt = 128,
        depth: PositiveInt = 4,
        heads: PositiveInt = 4,
        dropout: Fraction = 0.0,
        vocab_size: PositiveInt = _BYTES,
    ) -> None:
        super().__init__()
        self.context, self.vocab_size, self.heads = context, vocab_size, heads
        self.dropout = dropout
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        # 0.02, as in GPT-2, learns slower: 2.36 after 220 steps instead of 2.26
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.05)
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        # scaled down by the number of blocks (Radford et al. 2019, section 2.3)
        for block in self.blocks:
            for layer in (block.attention.out, block.wide[2]):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))
        self.head.weight = self.tokens.weight  # tied (Press & Wolf 2017)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        return self.head(self.states(bytes_BT))

    def states(self, bytes_BT: Tensor) -> Tensor:
        """Return what the output layer reads, [B, T, D]."""
        T = bytes_BT.shape[1]
        if self.context < (whole := whole_length(T)):
            raise ConfigError(
                f"task.model.context is {self.context}; it must be {whole} or more, for a text of"
                f" {whole} bytes."
            )
        x_BTD = self.tokens(bytes_BT) + rows(self.places.weight, T)
        return self.norm(self.blocks(x_BTD))

    def dropouts(self) -> dict[str, float]:
        """Return the shares that transformers drops; there the sum after attention is dropped too,
        here the wide layers' alone.
        """
        return {"resid_pdrop": self.dropout, "embd_pdrop": 0.0, "attn_pdrop": self.dropout}


class Windows(Dataset):
    """Windows of `length` tokens, int64; each begins with the last token of the one before, the
    last ends with the text.

    Args:
        text: a tensor, or anything whose slices are tensors.
        length: tokens of a window; the text has as many at least.
        stride: tokens between the beginnings of two windows; None for `length - 1`.
    """

    def __init__(self, text: Any, length: int, stride: int | None = None) -> None:
        self.text, self.length, self.stride = text, length, stride or length - 1

    def __len__(self) -> int:
        return math.ceil((len(self.text) - self.length) / self.stride) + 1

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = min(index * self.stride, len(self.text) - self.length)
        return self.text[start : start + self.length].long()


class TextBytes(trainkit.DataModule):
    """The bytes of a file, or of all text files of a folder; the last tenth of them for validation.

    Args:
        root: a folder; without it and a file, trainkit's own sources are read, so nothing is
            downloaded.
        pattern: of the files below root. Default: **/*.txt, and **/*.py of trainkit's own sources.
        batch_size: the microbatch of one rank, in windows.
        context: bytes that the model sees of a window.
        num_workers: loader processes; the text is in memory, so none is fastest.
        file: a text file, in place of a folder.
    """

    batch_shape = "tokens [B, T + 1]"

    vocab_size = _BYTES

    def __init__(
        self,
        root: ExistingFolder | None = None,
        pattern: str | None = None,
        batch_size: PositiveInt = 16,
        context: PositiveInt = 128,
        num_workers: NonNegativeInt = 0,
        file: ExistingFile | None = None,
    ) -> None:
        if file is not None and (root, pattern) != (None, None):
            raise ConfigError(
                f"data.file is '{file}', and data.root or data.pattern is set too. Give a file, or"
                " a folder."
            )
        self.file = None if file is None else Path(file)
        self.root = Path(trainkit.__file__).parent if root is None else Path(root)
        self.pattern = pattern or ("**/*.py" if root is None else "**/*.txt")
        self.batch_size, self.context, self.num_workers = batch_size, context, num_workers

    def setup(self, stage: str) -> None:
        files = (
            [self.file]
            if self.file
            else sorted(path for path in self.root.glob(self.pattern) if path.is_file())
        )
        text = bytearray(b"\n".join(path.read_bytes() for path in files))
        if len(text) < 20 * (self.context + 1):
            where, hint = f"data.file is {self.file}: it has", "Give a longer text"
            if self.file is None:
                where = (
                    f"data.root is {self.root}: the {len(files)} files that match"
                    f" data.pattern={self.pattern} have"
                )
                hint = "Give a folder with more text, or another pattern"
            least = 20 * (self.context + 1)
            raise DataError(
                f"{where} {len(text)} bytes, too few for windows of {self.context} ({least})."
                f" {hint}, or a smaller data.context."
            )
        whole = torch.frombuffer(text, dtype=torch.uint8)
        split = len(whole) * 9 // 10
        self.train = Windows(whole[:split], self.context + 1)
        self.val = Windows(whole[split:], self.context + 1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()
