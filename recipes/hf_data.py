"""Texts for recipes/hf.py: files of texts, with labels or without,
as padded batches of token numbers.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import trainkit
from trainkit.arguments import ExistingFile, ExistingFolder, NonNegativeInt, PositiveInt
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.tokenizer_folder import write_of_bytes

_PAD, _BEGIN = 256, 257  # beside the 256 bytes
_MASKED = -100
Row = tuple[str, str]  # text, label


def sentences() -> list[Row]:
    """Return 720 reviews of a sentence, labelled good or bad, in a mixed order:
    the data of a recipe without a file.
    """
    parts = (
        ("The", "This", "Their", "Our last"),
        ("film", "dinner", "hotel", "concert", "book", "coffee"),
        ("was", "was really", "turned out to be"),
    )
    good = ("delightful", "great", "lovely", "excellent", "fine")
    bad = ("awful", "dull", "poor", "dreadful", "sad")
    begun = [" ".join(start) for start in itertools.product(*parts)]
    rows = [
        (f"{start} {end}.", label)
        for start in begun
        for label, ends in (("good", good), ("bad", bad))
        for end in ends
    ]
    random.Random(0).shuffle(rows)
    return rows


class Bytes:
    """A tokenizer of bytes, called as transformers' are."""

    eos_token_id = _PAD
    vocab_size = _BEGIN + 1

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Return a text's token numbers."""
        return {"input_ids": [_BEGIN, *text.encode()]}

    def decode(self, ids: list[int], **_: Any) -> str:
        """Return the text of token numbers."""
        return bytes(number for number in ids if number < _PAD).decode(errors="replace")

    def save_pretrained(self, folder: Path) -> None:
        """Write it into a folder, for AutoTokenizer of transformers."""
        roles = {"pad_token": (_PAD, "<pad>"), "bos_token": (_BEGIN, "<s>")}
        write_of_bytes(folder, roles | {"eos_token": roles["pad_token"]}, begins=True)


class TokensInMemory(trainkit.DataModule):
    """Loaders of two datasets, `train` and `val`, with `batch_size`, `num_workers` and `collate`;
    val is for tests and predictions too.
    """

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val, shuffle=False)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def _loader(self, dataset: Dataset[Any], shuffle: bool) -> DataLoader:
        return DataLoader(
            dataset,
            self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=self.collate,
        )


class Texts(TokensInMemory):
    """Texts with labels, for a classifier; or without (`num_classes=null`), for a language model.

    A .csv has the columns text and label, a line of a .jsonl both keys; a .txt has a text in each
    line, and no labels. Labels are texts, numbered in their order.

    Args:
        file: of training; None for generated sentences.
        val_file: of validation; None takes a tenth of `file`: each tenth text.
        tokenizer: a folder of a tokenizer of transformers; None for bytes, with 256 to pad and 257
            at each text's beginning.
        num_classes: number of different labels; None for texts without labels.
        batch_size: the microbatch of one rank, in texts.
        max_length: tokens; the rest of a longer text is left out.
        num_workers: loader processes.
    """

    batch_shape = {
        "num_classes": "a dict of input_ids [B, T], attention_mask [B, T] and labels [B]",
        "": "a dict of input_ids [B, T], attention_mask [B, T] and labels [B, T]",
    }

    def __init__(
        self,
        file: ExistingFile | None = None,
        val_file: ExistingFile | None = None,
        tokenizer: ExistingFolder | None = None,
        num_classes: PositiveInt | None = None,
        batch_size: PositiveInt = 16,
        max_length: PositiveInt = 128,
        num_workers: NonNegativeInt = 0,
    ) -> None:
        self.file, self.val_file, self.num_classes = file, val_file, num_classes
        self.batch_size, self.max_length, self.num_workers = batch_size, max_length, num_workers
        self.tokenizer = None if tokenizer is None else _tokenizer(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Return the number of different tokens."""
        return Bytes.vocab_size if self.tokenizer is None else len(self.tokenizer)

    @property
    def pad_token_id(self) -> int:
        """Return the token that fills a batch behind its shorter texts."""
        return _PAD if self.tokenizer is None else self.tokenizer.pad_token_id

    def setup(self, stage: str) -> None:
        labelled = self.num_classes is not None
        rows = sentences() if self.file is None else read_texts(self.file, labelled)
        held_out = rows[::10] if self.val_file is None else read_texts(self.val_file, labelled)
        if self.val_file is None:
            rows = [row for i, row in enumerate(rows) if i % 10]
        self.classes = _in_order({label for _, label in [*rows, *held_out]}) if labelled else []
        if labelled and len(self.classes) != self.num_classes:
            raise ConfigError(
                f"data.num_classes is {self.num_classes}, but the texts have {len(self.classes)}"
                f" labels ({', '.join(self.classes[:5])}{', ...' * (len(self.classes) > 5)}). Set"
                f" data.num_classes={len(self.classes)}."
            )
        self.train, self.val = TokenDataset(rows, self), TokenDataset(held_out, self)

    def tokens(self, text: str) -> Tensor:
        """Return a text's token numbers, int64 [T]."""
        if self.tokenizer is not None:
            ids = self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]
            return torch.tensor(ids, dtype=torch.int64)
        return torch.tensor(Bytes()(text)["input_ids"][: self.max_length])

    def collate(self, samples: list[tuple[Tensor, int | None]]) -> dict[str, Tensor]:
        """Return a batch padded to its longest text: input_ids and attention_mask [B, T];
        labels [B], or [B, T] of tokens.
        """
        ids = [tokens for tokens, _ in samples]
        lengths_B1 = torch.tensor([[len(tokens)] for tokens in ids])
        ids_BT = torch.nn.utils.rnn.pad_sequence(
            ids, batch_first=True, padding_value=self.pad_token_id
        )
        mask_BT = (torch.arange(ids_BT.shape[1]) < lengths_B1).long()
        labels = (
            torch.tensor([label for _, label in samples])
            if self.classes
            else ids_BT.masked_fill(mask_BT == 0, _MASKED)
        )
        return {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels}


class TokenDataset(Dataset[Any]):
    """Pairs of token numbers [T] and the label's number, or None."""

    def __init__(self, rows: list[Row], data: Texts) -> None:
        self.rows, self.data, self.classes = rows, data, data.classes
        self._numbers = {name: number for number, name in enumerate(data.classes)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int | None]:
        text, label = self.rows[index]
        return self.data.tokens(text), self._numbers.get(label)


def read_texts(file: str, labelled: bool) -> list[Row]:
    """Return the texts of a file with their labels ("" if there are none to read).

    Raises:
        DataError: of another kind, or without a text or a label; it names the line.
    """
    path, kind = Path(file), Path(file).suffix
    if kind not in (".csv", ".jsonl", ".txt") or (kind == ".txt" and labelled):
        wanted = "a .csv or .jsonl with text and label" if labelled else "a .txt, .csv or .jsonl"
        raise DataError(f"data.file is {file}; it must be {wanted}.")
    with path.open(encoding="utf-8", newline="" if kind == ".csv" else None) as lines:
        if kind == ".txt":
            return _some([(line.strip(), "") for line in lines if line.strip()], file)
        rows, first = [], 2 if kind == ".csv" else 1
        for number, row in enumerate(
            csv.DictReader(lines) if kind == ".csv" else map(_object, lines), first
        ):
            text, label = row.get("text"), row.get("label") if labelled else ""
            if not text or label is None:
                lacking = "text" if not text else "label"
                raise DataError(
                    f"{file}: row {number} has no '{lacking}'; it has"
                    f" {', '.join(map(str, row)) or 'nothing'}."
                )
            rows.append((str(text), str(label)))
        return _some(rows, file)


def _in_order(labels: set[str]) -> list[str]:
    are_numbers = all(label.isdecimal() for label in labels)
    return sorted(labels, key=int if are_numbers else None)


def _some(rows: list[Row], file: str) -> list[Row]:
    if len(rows) < 2:
        raise DataError(f"{file} has {len(rows)} texts; it needs two at least.")
    return rows


def _object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = {}
    return row if isinstance(row, dict) else {}


def _tokenizer(folder: str) -> Any:
    try:
        import transformers  # noqa: PLC0415 - only with a tokenizer
    except ImportError as error:
        raise ConfigError(
            "data.tokenizer needs transformers: pip install 'trainkit[transformers]'"
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.tokenizer is '{folder}', and no tokenizer can be loaded from it: {error}"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # as usual for GPT; it is masked
    return tokenizer
