"""A mixture of folders of tokens, by weights."""

from __future__ import annotations

import math
from pathlib import Path

from torch.utils.data import ConcatDataset, DataLoader

from recipes.gpt import Windows
from recipes.tokens import TokenFiles
from trainkit.arguments import NonNegativeInt, PositiveInt
from trainkit.console import short
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.mixture import Mixture
from trainkit.extensions.language.token_files import TokenFolder, Tokens, open_tokens


class TokenMixture(TokenFiles):
    """Windows of several folders of `python -m trainkit data tokens`, of one tokenizer.

    Which window comes at which place of a run depends on the seed, the weights and the folders
    alone (language.mixture). Validation reads the held-out parts one after the other.

    Args:
        roots: the folders.
        weights: of each folder, 0 or more: its share of the windows, once divided by their sum.
        vocab_size: see TokenFiles, as for the next ones.
        batch_size: the microbatch of one rank, in windows.
        context: tokens that the model sees of a window.
        num_workers: loader processes.
        epoch_size: windows of an epoch; None for as many as all folders have together.
    """

    def __init__(
        self,
        roots: list[str],
        weights: list[float],
        vocab_size: PositiveInt = 256,
        batch_size: PositiveInt = 8,
        context: PositiveInt = 1024,
        num_workers: NonNegativeInt = 0,
        epoch_size: PositiveInt | None = None,
    ) -> None:
        super().__init__(None, vocab_size, batch_size, context, num_workers)
        self.roots, self.weights, self.epoch_size = list(roots), list(weights), epoch_size
        self._check()

    @property
    def tokenizer(self) -> Path | None:
        """Return the first folder's tokenizer.json, which a run keeps; None for bytes."""
        return open_tokens(self.roots[0]).tokenizer

    def setup(self, stage: str) -> None:
        folders = [open_tokens(root) for root in self.roots]
        for folder in folders:
            self._require_equal(folders[0], folder)
        self.special_tokens = folders[0].special_tokens
        self._require_vocabulary(folders[0].vocab_size, "data.roots")
        self.train = ConcatDataset([self._windows(folder, folder.train) for folder in folders])
        self.val = ConcatDataset([self._windows(folder, folder.val) for folder in folders])
        sizes = [len(part) for part in self.train.datasets]
        self.mixture = Mixture(sizes, self.weights, self.epoch_size)
        run = getattr(self, "_trainer", None)
        if run is not None and stage == "fit":
            run.say(f"mixture          {self._describe(folders)}")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            self.train, self.batch_size, sampler=self.mixture, num_workers=self.num_workers
        )

    def _describe(self, folders: list[TokenFolder]) -> str:
        """Return the folders in a line, and how often an epoch reads each."""
        whole = sum(self.weights)
        parts = [
            f"{short(folder.root)} {weight / whole:.1%} of {len(folder.train):,} tokens,"
            f" {passes:.3g} passes"
            for folder, weight, passes in zip(
                folders, self.weights, self.mixture.passes(), strict=True
            )
        ]
        return f"an epoch of {len(self.mixture):,} windows: {'; '.join(parts)}"

    def _check(self) -> None:
        """Raise a ConfigError for weights that no mixture can have."""
        roots, weights = self.roots, self.weights
        if not roots or len(roots) != len(weights):
            raise ConfigError(
                f"data.roots has {len(roots)} folders and data.weights {len(weights)} numbers; give"
                " a weight for each folder: 'data.roots=[web,code]' 'data.weights=[0.7,0.3]'"
            )
        if len({Path(root).resolve() for root in roots}) < len(roots):
            raise ConfigError(
                f"data.roots is {roots}, with a folder twice. Name each once, with a larger weight."
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ConfigError(
                f"data.weights is {weights}; each must be a number, 0 or more. 0 leaves a folder"
                " out of training."
            )
        if sum(weights) == 0:
            raise ConfigError(
                f"data.weights is {weights}, which sums to nothing: no folder would be read. Give"
                " one of them a weight above 0."
            )

    def _require_equal(self, first: TokenFolder, other: TokenFolder) -> None:
        """Raise a ConfigError if a number does not mean the same token in both."""
        texts = [
            None if folder.tokenizer is None else folder.tokenizer.read_bytes()
            for folder in (first, other)
        ]
        is_equal = texts[0] == texts[1] and first.vocab_size == other.vocab_size
        if not is_equal or first.special_tokens != other.special_tokens:
            raise ConfigError(
                f"data.roots has {first.root} with a vocabulary of {first.vocab_size} and"
                f" {other.root} with one of {other.vocab_size}, of different tokenizers: a number"
                " would not mean the same token. Write both with one: python -m trainkit data"
                " tokens TEXTS output=FOLDER tokenizer=FILE"
            )

    def _windows(self, folder: TokenFolder, part: Tokens) -> Windows:
        if len(part) <= self.context:
            raise DataError(
                f"{folder.root} of data.roots: its {part.path.stem} part has {len(part)} tokens,"
                f" too few for a window of data.context={self.context} and one more. Leave the"
                " folder out, give more text, or a smaller data.context."
            )
        return Windows(part, self.context + 1)
