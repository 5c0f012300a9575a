"""Windows of a folder of tokens, mapped into memory:
for the next token (TokenFiles), and for masked ones (MaskedTokens).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import trainkit
from recipes.gpt import Windows
from trainkit.arguments import ExistingFolder, Fraction, NonNegativeInt, PositiveInt
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.token_files import TOKENIZER, open_tokens
from trainkit.extensions.language.tokenizer import ByteTokenizer

_OWN_BYTES = 1_000_000  # at least; files are whole
_UNMASKED = -100  # a label that counts in no loss


class TokenFiles(trainkit.DataModule):
    """Windows of `context + 1` tokens, documents one after the other, of a folder of `python -m
    trainkit data tokens`.

    Args:
        root: the folder; without it a megabyte of trainkit's own sources is read, as bytes.
        vocab_size: the number of different tokens of the folder, or more: the model's; 256 for
            bytes.
        batch_size: the microbatch of one rank, in windows.
        context: tokens that the model sees of a window.
        num_workers: loader processes; the files are mapped into memory, so none is fastest.
    """

    batch_shape = "tokens [B, T + 1]"

    def __init__(
        self,
        root: ExistingFolder | None = None,
        vocab_size: PositiveInt = 256,
        batch_size: PositiveInt = 8,
        context: PositiveInt = 1024,
        num_workers: NonNegativeInt = 0,
    ) -> None:
        self.root, self.vocab_size = root, vocab_size
        self.batch_size, self.context, self.num_workers = batch_size, context, num_workers

    @property
    def tokenizer(self) -> Path | None:
        """Return the folder's tokenizer.json, which a run keeps; None for bytes."""
        path = None if self.root is None else Path(self.root, TOKENIZER)
        return path if path is not None and path.is_file() else None

    def setup(self, stage: str) -> None:
        if self.root is None:
            parts = own_sources()
            self.special_tokens = ByteTokenizer.special_tokens
            self._require_vocabulary(ByteTokenizer.vocab_size, "data.root=None")
        else:
            folder = open_tokens(self.root)
            parts = (folder.train, folder.val)
            self.special_tokens = folder.special_tokens
            self._require_vocabulary(folder.vocab_size, f"data.root={self.root}")
        for name, part in zip(("train", "val"), parts, strict=True):
            if len(part) <= self.context:
                raise DataError(
                    f"data.root is {self.root}: its {name} part has {len(part)} tokens, too few for"
                    f" a window of data.context={self.context} and one more. Give more text, or a"
                    " smaller data.context."
                )
        self.train, self.val = (self.windows(part) for part in parts)

    def _require_vocabulary(self, size: int, place: str) -> None:
        if size > self.vocab_size:
            raise ConfigError(
                f"data.vocab_size is {self.vocab_size}; it must be {size} or more, the vocabulary"
                f" of {place}. Set data.vocab_size={size}."
            )

    def windows(self, text: Any) -> Dataset:
        """Return the samples of a text."""
        return Windows(text, self.context + 1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()


class MaskedTokens(TokenFiles):
    """Windows of `context` tokens of which some are to be predicted: pairs (tokens, labels), see
    MaskedWindows.

    Args:
        root: see TokenFiles; its tokenizer has a token for masks.
        vocab_size: see TokenFiles, as for the next ones.
        mask_share: the share of tokens to predict.
    """

    batch_shape = "masked tokens [B, T] and labels [B, T]"

    def __init__(
        self,
        root: ExistingFolder | None = None,
        vocab_size: PositiveInt = 256,
        batch_size: PositiveInt = 8,
        context: PositiveInt = 512,
        num_workers: NonNegativeInt = 0,
        mask_share: Fraction = 0.15,
    ) -> None:
        super().__init__(root, vocab_size, batch_size, context, num_workers)
        self.mask_share = mask_share

    def windows(self, text: Any) -> Dataset:
        if "mask" not in self.special_tokens:
            raise ConfigError(
                f"data.root is {self.root}, and its tokenizer has no token for masks ([MASK] or"
                " <mask>). Write the folder with one that has, as BERT's: python -m trainkit data"
                " tokens TEXTS output=FOLDER tokenizer=FILE"
            )
        return MaskedWindows(
            text, self.context, self.special_tokens, self.vocab_size, self.mask_share
        )


class MaskedWindows(Dataset):
    """Windows with masked tokens: (tokens, labels), both int64 [length]; labels are -100 where
    nothing is to be predicted.

    Of the tokens to predict, 80 % are masked, 10 % replaced by any token and 10 % left (Devlin et
    al. 2019, section 3.1). They are drawn for each sample of each epoch, so that they do not depend
    on ranks, workers and interruptions. If the tokenizer has a token to begin with, a window begins
    with it, and ends with that which ends a text.
    """

    def __init__(self, text: Any, length: int, special: Any, vocab_size: int, share: float) -> None:
        self.framed = "begin" in special
        self.of_text = Windows(text, length - 2 * self.framed, stride=length - 2 * self.framed)
        self.special, self.vocab_size, self.share = special, vocab_size, share

    def __len__(self) -> int:
        return len(self.of_text)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens_T = self.of_text[index]
        if self.framed:
            first, last = (torch.tensor([self.special[kind]]) for kind in ("begin", "end_of_text"))
            tokens_T = torch.cat([first, tokens_T, last])
        is_special_T = torch.isin(tokens_T, torch.tensor([*self.special.values()]))
        drawn_T, how_T = torch.rand(2, len(tokens_T))
        chosen_T = (drawn_T < self.share) & ~is_special_T
        labels_T = tokens_T.where(chosen_T, _UNMASKED)
        tokens_T = tokens_T.masked_fill(chosen_T & (how_T < 0.8), self.special["mask"])
        replaced_T = torch.randint(self.vocab_size, tokens_T.shape)
        return replaced_T.where(chosen_T & (how_T >= 0.9), tokens_T), labels_T


def own_sources() -> tuple[Tensor, Tensor]:
    """Return the first megabyte of trainkit's own sources, nine tenths and the last one:
    the data of a recipe without a folder, of which a small model reads an epoch in a minute.
    """
    end = bytes([ByteTokenizer.special_tokens["end_of_text"]])
    read = bytearray()
    for path in sorted(Path(trainkit.__file__).parent.rglob("*.py")):
        if len(read) < _OWN_BYTES:
            read += path.read_bytes() + end
    text = torch.frombuffer(read, dtype=torch.uint8)
    split = len(text) * 9 // 10
    return text[:split], text[split:]
