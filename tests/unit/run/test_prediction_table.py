"""The table of predictions: a row for each sample in order, with file, label,
prediction and probabilities.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from tests.helpers.threads import World
from tests.helpers.toy import Line, loader, quiet, rows
from trainkit.errors import ConfigError
from trainkit.run.prediction_table import columns_of, merge


class Pets(Dataset[Any]):
    """Ten pictures of two classes."""

    classes = ["cat", "dog"]

    def __init__(self) -> None:
        self.samples = [(f"pets/{i}.jpg", i % 2) for i in range(10)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), self.samples[index][1]


class Classifier(Line):
    """Its logit of "dog" grows with the index."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.cat([torch.zeros_like(batch[0]), batch[0] - 4.5], 1)


def table(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a run's table."""
    with (folder / "predictions" / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_sample_has_a_row(ranks: int, tmp_path: Path) -> None:
    """In the data set's order, on any number of ranks; nothing else is left behind."""
    World(ranks).run(
        lambda e: quiet(tmp_path, engine=e).predict(Classifier(), loader(Pets(), 3), write_to=True)
    )
    rows = table(tmp_path)
    assert [row["index"] for row in rows] == [str(i) for i in range(10)]
    assert rows[7] == {
        "index": "7",
        "file": "pets/7.jpg",
        "label": "dog",
        "prediction": "dog",
        "probability": "0.924142",
        "p:cat": "0.0758582",
        "p:dog": "0.924142",
    }
    assert [row["prediction"] for row in rows] == ["cat"] * 5 + ["dog"] * 5
    assert {path.suffix for path in (tmp_path / "predictions").iterdir()} == {".pt", ".csv"}


def test_indices_are_those_of_the_given_data(tmp_path: Path) -> None:
    """A part of a data set has its own indices, and the files of the whole;
    a skipped sample has no row.
    """

    class Broken(Pets):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index == 8:
                raise OSError("broken")
            return super().__getitem__(index)

    data = Subset(Broken(), [9, 8, 7])
    quiet(tmp_path, on_bad_sample="skip").predict(Classifier(), loader(data, 2), write_to=True)
    assert [(row["index"], row["file"]) for row in table(tmp_path)] == [
        ("0", "pets/9.jpg"),
        ("2", "pets/7.jpg"),
    ]


def test_a_later_run_replaces_the_table(tmp_path: Path) -> None:
    """Values of samples are written as they are; data in memory has no file."""
    quiet(tmp_path).predict(Classifier(), loader(Pets(), 3), write_to=True)
    quiet(tmp_path).predict(Line(), loader(rows(5)), write_to=True)
    assert [list(row) for row in table(tmp_path)] == [["index", "label", "prediction"]] * 5


@pytest.mark.parametrize(
    ("outputs", "columns"),
    [
        (torch.tensor([2, 0]), {"prediction": [2, 0]}),
        (
            {"score": torch.tensor([[0.5], [0.25]]), "text": ["a", "b"]},
            {"score": [0.5, 0.25], "text": ["a", "b"]},
        ),
        (
            torch.tensor([[0.25, 0.75]]),
            {"prediction": [1], "probability": ["0.75"], "p:0": ["0.25"], "p:1": ["0.75"]},
        ),
        (torch.zeros(2, 3, 4), {}),
        ([1, 2], {}),
    ],
)
def test_columns_follow_from_the_outputs(outputs: Any, columns: Any) -> None:
    """Values, mappings of values, and scores of classes:
    probabilities are taken as they are, logits through a softmax.
    """
    assert columns_of(outputs, None) == columns


def test_many_classes_leave_their_probabilities_in_the_tensors() -> None:
    """A table with a thousand columns would serve no one."""
    assert list(columns_of(torch.randn(2, 1000), None)) == ["prediction", "probability"]


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before the first batch."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs pyarrow: pip install pyarrow"):
        quiet(tmp_path).predict(Line(), loader(5), write_to=True, table="parquet")
    assert not (tmp_path / "predictions").exists()


def test_parquet_holds_the_same_table(tmp_path: Path) -> None:
    """Numbers are numbers, names are texts, and the CSV is replaced."""
    quiet(tmp_path).predict(Classifier(), loader(Pets(), 3), write_to=True, table="parquet")
    read = parquet.read_table(tmp_path / "predictions" / "predictions.parquet")
    assert read.column_names == [
        "index",
        "file",
        "label",
        "prediction",
        "probability",
        "p:cat",
        "p:dog",
    ]
    assert [str(kind) for kind in read.schema.types] == [
        "int64",
        "string",
        "string",
        "string",
        "double",
        "double",
        "double",
    ]
    row = read.to_pylist()[7]
    assert (row["index"], row["file"], row["label"], row["p:cat"]) == (
        7,
        "pets/7.jpg",
        "dog",
        0.0758582,
    )
    assert not (tmp_path / "predictions" / "predictions.csv").exists()


def test_parquet_takes_texts(tmp_path: Path) -> None:
    """A text may have several lines,
    and a column that begins with megabytes of numbers may end with words.
    """
    texts = ["7" * 18] * 100_000 + [f"two,{i}\n" * 20 for i in range(20_000)]
    part = tmp_path / ".table-00000.csv"
    with part.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["place", "rank", "row", "text"], *([0, 0, i, text] for i, text in enumerate(texts))]
        )
    assert merge(tmp_path, "parquet") == tmp_path / "predictions.parquet"
    assert parquet.read_table(tmp_path / "predictions.parquet")["text"].to_pylist() == texts
