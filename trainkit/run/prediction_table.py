"""The table of predictions: a row for each sample, beside the tensors of predictions.py, for people
and spreadsheets.

    index, file, label, prediction, probability, p:<class> ...

Columns that are not known are left out: the index of a stream, the file of data in memory. A rank
writes its rows while it predicts; rank 0 then merges them in the data set's order.
"""

from __future__ import annotations

import csv
import heapq
import importlib
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from torch import Tensor

from trainkit.console import cell
from trainkit.data.sample_names import class_names_of, file_of
from trainkit.errors import ConfigError

TableFormat = Literal["csv", "parquet"]
_NAME = "predictions.csv"
_PARTS = ".table-*.csv"
_MOST_COLUMNS = 100  # probabilities of more classes are in the tensors alone
_LABELS = ("label", "labels", "target", "targets", "y")


def check_format(name: str) -> None:
    """Refuse a format that cannot be written here.

    Raises:
        ConfigError: parquet is requested without pyarrow.
    """
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "table is 'parquet', which needs pyarrow: pip install pyarrow. Or use table=csv."
        )


class PredictionTable:
    """Writes the rows of one rank, and on rank 0 the table.

    Args:
        folder: of the predictions.
        rank: this rank.
        dataset: names files and classes; None for a stream.
    """

    def __init__(self, folder: Path, rank: int, dataset: Any) -> None:
        self._folder = folder
        self._rank = rank
        self._dataset = dataset
        self._classes = class_names_of(dataset)
        self._file: TextIO | None = None
        self._columns: list[str] | None = None

    def add(self, place: int, indices: Sequence[int] | None, batch: Any, outputs: Any) -> None:
        """Write the rows of a batch; outputs that are no values of samples are left out.

        Args:
            place: of the batch in the order of rows.
            indices: of the samples in the data set.
            outputs: of predict_step, on the CPU.
        """
        columns = columns_of(outputs, self._classes)
        if not columns:
            return
        count = len(next(iter(columns.values())))
        about: dict[str, Sequence[Any]] = {}
        if indices is not None and len(indices) == count:
            about["index"] = indices
            files = [file_of(self._dataset, index) for index in indices]
            about |= {"file": files} if any(files) else {}
        labels = labels_of(batch, count)
        about |= {} if labels is None else {"label": _named(labels, self._classes)}
        columns = about | columns
        if self._columns is None:
            self._columns = list(columns)
            self._file = (self._folder / _PARTS.replace("*", f"{self._rank:05d}")).open(
                "w", newline=""
            )
            csv.writer(self._file).writerow(["place", "rank", "row", *map(cell, columns)])
        rows = zip(*(columns.get(name, [""] * count) for name in self._columns), strict=True)
        csv.writer(self._file).writerows(  # type: ignore[arg-type]
            [place, self._rank, i, *map(cell, row)] for i, row in enumerate(rows)
        )

    def close(self) -> None:
        """End this rank's rows."""
        if self._file is not None:
            self._file.close()
            self._file = None


def clear_table(folder: Path) -> None:
    """Remove the table of an earlier run, and rows that a killed one left."""
    for path in [*folder.glob(_PARTS), folder / _NAME, (folder / _NAME).with_suffix(".parquet")]:
        path.unlink(missing_ok=True)


def merge(folder: Path, kind: TableFormat) -> Path | None:
    """Rank 0: write the table from the rows of all ranks, and return its file;
    None if there are no rows.
    """
    parts = sorted(folder.glob(_PARTS))
    if not parts:
        return None
    path, draft = folder / _NAME, folder / f"{_NAME}.draft"
    with draft.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(next(_rows(parts[0]))[3:])
        rows = (itertools.islice(_rows(part), 1, None) for part in parts)
        writer.writerows(
            row[3:] for row in heapq.merge(*rows, key=lambda row: [int(cell) for cell in row[:3]])
        )
    draft.replace(path)
    for part in parts:
        part.unlink()
    return _as_parquet(path) if kind == "parquet" else path


def _rows(path: Path) -> Iterator[list[str]]:
    with path.open(newline="") as file:
        yield from csv.reader(file)


def _as_parquet(path: Path) -> Path:
    reader: Any = importlib.import_module("pyarrow.csv")
    writer: Any = importlib.import_module("pyarrow.parquet")
    made = path.with_suffix(".parquet")
    # else a block may begin within a text of several lines
    parse = reader.ParseOptions(newlines_in_values=True)
    writer.write_table(reader.read_csv(path, parse_options=parse), made)
    path.unlink()
    return made


def columns_of(outputs: Any, classes: Sequence[str] | None) -> dict[str, Sequence[Any]]:
    """Return the columns of a batch's outputs:
    one value of each sample, scores of classes, or a mapping of both.
    """
    if isinstance(outputs, Mapping):
        columns: dict[str, Sequence[Any]] = {}
        for name, value in outputs.items():
            if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] > 1:
                columns |= columns_of(value, classes) if value.is_floating_point() else {}
            elif isinstance(value, (Tensor, list, tuple)) and not (
                isinstance(value, Tensor) and value.numel() != len(value)
            ):
                columns[str(name)] = (
                    value.flatten().tolist() if isinstance(value, Tensor) else list(value)
                )
        sizes = [len(column) for column in columns.values()]
        return columns if len(set(sizes)) == 1 else {}
    if not isinstance(outputs, Tensor) or outputs.dim() == 0:
        return {}
    if outputs.numel() == len(outputs):
        return {"prediction": _named(outputs.flatten(), classes)}
    if outputs.dim() != 2 or not outputs.is_floating_point():
        return {}
    return _scores(outputs.double(), classes)


def _scores(outputs_BC: Tensor, classes: Sequence[str] | None) -> dict[str, Sequence[Any]]:
    are_probabilities = bool(
        (outputs_BC >= 0).all() and ((outputs_BC.sum(1) - 1).abs() < 1e-3).all()
    )
    probabilities_BC = outputs_BC if are_probabilities else outputs_BC.softmax(1)
    best_B, places_B = probabilities_BC.max(1)
    columns: dict[str, Sequence[Any]] = {
        "prediction": _named(places_B, classes),
        "probability": _rounded(best_B),
    }
    num_classes = outputs_BC.shape[1]
    if num_classes <= _MOST_COLUMNS:
        names = (
            classes if classes is not None and len(classes) == num_classes else range(num_classes)
        )
        columns |= {f"p:{name}": _rounded(probabilities_BC[:, i]) for i, name in enumerate(names)}
    return columns


def labels_of(batch: Any, count: int) -> Tensor | None:
    """Return the labels of a batch (inputs, labels), or under a name for them;
    None if there are none.
    """
    value = None
    if isinstance(batch, (list, tuple)) and len(batch) > 1:
        value = batch[1]
    elif isinstance(batch, Mapping):
        value = next((batch[name] for name in _LABELS if name in batch), None)
    fits = (
        isinstance(value, Tensor)
        and value.numel() == count
        and value.dim() > 0
        and len(value) == count
    )
    return value.flatten().cpu() if fits and isinstance(value, Tensor) else None


def _named(values: Tensor, classes: Sequence[str] | None) -> list[Any]:
    numbers = values.tolist()
    if (
        classes is None
        or values.is_floating_point()
        or not all(0 <= number < len(classes) for number in numbers)
    ):
        return numbers
    return [classes[number] for number in numbers]


def _rounded(values: Tensor) -> list[str]:
    return [f"{value:.6g}" for value in values.tolist()]
