"""Preference pairs for recipes/dpo.py: a prompt, and two answers of which one is better, in tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.hf_data import TokensInMemory
from recipes.sft_data import byte_tokenizer, load_tokenizer
from trainkit.arguments import ExistingFile, NonNegativeInt, PositiveInt
from trainkit.errors import DataError
from trainkit.extensions.language.chat_template import use_template
from trainkit.extensions.language.packing import Document, lay_out
from trainkit.extensions.language.preferences import (
    AnswerPair,
    EncodedPairs,
    encode_pairs,
    read_pairs,
)


def right_and_wrong_sums() -> list[AnswerPair]:
    """Return 300 sums with a right and a wrong result: the data of a recipe without a file."""
    draw = random.Random(0)
    result = []
    for number in range(300):
        a, b, error = draw.randrange(10), draw.randrange(10), draw.choice((-2, -1, 1, 2, 10))
        prompt = [{"role": "user", "content": f"{a} + {b} = ?"}]
        right, wrong = (
            [{"role": "assistant", "content": f"{answer}"}] for answer in (a + b, a + b + error)
        )
        result.append(AnswerPair(prompt, right, wrong, None, f"generated, row {number + 1}"))
    return result


class PreferencePairs(TokensInMemory):
    """Pairs of a better and a worse answer to a prompt, in TRL's formats. A sample is a pair.

    Args:
        file: of training: a .jsonl or .parquet, or a folder of datasets' save_to_disk; None for
            generated sums.
        val_file: of validation; None takes each tenth pair of `file`.
        tokenizer: a folder or a hub's name of a tokenizer of transformers; None for bytes.
        chat_template: a file of one, in place of the tokenizer's own.
        batch_size: the microbatch of one rank, in pairs.
        max_length: tokens of a prompt and its answer at most.
        too_long: a longer answer loses its end, or its pair is left out, or it is an error.
        num_workers: loader processes; the tokens are in memory, so none is fastest.

    Attributes:
        reference: log-probabilities of the pairs under the starting model [pairs, 2], of training
            and then of validation, on the device; the Task sets it.
    """

    batch_shape = "a dict of input_ids [B, 2, T] and labels [B, 2, T], of preference pairs"

    def __init__(
        self,
        file: str | None = None,
        val_file: str | None = None,
        tokenizer: str | None = None,
        chat_template: ExistingFile | None = None,
        batch_size: PositiveInt = 8,
        max_length: PositiveInt = 512,
        too_long: Literal["cut", "leave_out", "refuse"] = "cut",
        num_workers: NonNegativeInt = 0,
    ) -> None:
        self.file, self.val_file, self.chat_template = file, val_file, chat_template
        self.batch_size, self.max_length, self.too_long = batch_size, max_length, too_long
        self.num_workers = num_workers
        self.tokenizer_name = tokenizer
        self.tokenizer = byte_tokenizer() if tokenizer is None else load_tokenizer(tokenizer)
        self.reference: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        """Return the number of different tokens."""
        return len(self.tokenizer)

    def setup(self, stage: str) -> None:
        pairs = right_and_wrong_sums() if self.file is None else read_pairs(self.file)
        held_out = pairs[::10] if self.val_file is None else read_pairs(self.val_file)
        if self.val_file is None:
            pairs = [pair for i, pair in enumerate(pairs) if i % 10]
        if self.chat_template or not all(pair.is_text for pair in (*pairs, *held_out)):
            use_template(self.tokenizer, self.chat_template, str(self.tokenizer_name))
        self.train = self._encoded(pairs, self.file or "generated sums", 0)
        self.val = self._encoded(held_out, self.val_file or "held out", len(self.train))

    def _encoded(self, pairs: list[AnswerPair], name: str, first: int) -> Pairs:
        encoded = encode_pairs(pairs, self.tokenizer, self.max_length, self.too_long)
        held = encoded.documents
        if len(encoded) == 0:
            raise DataError(
                f"{name} has {len(pairs)} pairs, and none can be trained on: {held.num_too_long} are"
                f" longer than data.max_length={self.max_length}, {held.num_silent} have a prompt"
                f" that fills it, and {encoded.num_equal} have equal answers. Raise"
                " data.max_length, or add data."
            )
        run = getattr(self, "_trainer", None)
        if run is not None:
            run.say(f"pairs            {name}: {_describe(encoded, len(pairs))}")
        return Pairs(encoded, first)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return a batch: input_ids, attention_mask and labels [B, 2, T], the chosen answer first,
        and index [B].
        """
        pad = self.tokenizer.pad_token_id
        documents = [[document] for sample in samples for document in sample.documents]
        rows = lay_out(documents, "padded", self.tokenizer.eos_token_id if pad is None else pad)
        index = torch.tensor([sample.index for sample in samples])
        return {name: rows_2BT.unflatten(0, (-1, 2)) for name, rows_2BT in rows.items()} | {
            "index": index
        }

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Add the reference of the batch's pairs [B, 2], once the Task has set it: here, since the
        way to the device may round numbers to its precision.
        """
        if self.reference is None:
            return batch
        return batch | {"reference": self.reference[batch["index"]]}


class Sample(NamedTuple):
    """A pair in tokens.

    Attributes:
        index: its place among all pairs.
        documents: the chosen one and the rejected one.
    """

    index: int
    documents: tuple[Document, Document]


class Pairs(Dataset[Any]):
    """Pairs in tokens, numbered from `first`."""

    def __init__(self, encoded: EncodedPairs, first: int) -> None:
        self.encoded, self.first = encoded, first
        self.digest = encoded.digest()

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> Sample:
        chosen, rejected = (self.encoded.documents.document(2 * index + i) for i in (0, 1))
        return Sample(self.first + index, (chosen, rejected))

    def batches(self, size: int) -> Iterator[list[int]]:
        """Yield the places of pairs of like length; the same on any number of ranks."""
        lengths = self.encoded.documents.lengths()
        order = sorted(range(len(self)), key=lambda i: max(lengths[2 * i : 2 * i + 2]))
        for begin in range(0, len(order), size):
            yield order[begin : begin + size]


def _describe(encoded: EncodedPairs, num_read: int) -> str:
    """Return what was made of the pairs that were read, in a line."""
    held = encoded.documents
    counts: Mapping[str, int] = {
        "cut at data.max_length": held.num_cut,
        "left out as too long": held.num_too_long,
        "left out, since the prompt fills data.max_length": held.num_silent,
        "left out, since both answers are the same": encoded.num_equal,
        "whose prompt ends with other tokens once an answer follows": encoded.num_rewritten,
    }
    parts = [f"{num_read:,}, {len(held.tokens):,} tokens, {int(held.trained.sum()):,} of answers"]
    return "; ".join([*parts, *(f"{count:,} {what}" for what, count in counts.items() if count)])
