"""Names of samples for people: the file of a sample, one that is unreadable,
the classes of a data set's labels.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from trainkit.errors import DataError


class UnreadableSample(DataError):  # noqa: N818 - a DataError
    """A data set raised for one sample what a missing or damaged file raises;
    that error is the cause.
    """

    @classmethod
    def of(cls, dataset: Any, index: int, error: Exception) -> UnreadableSample:
        """Return the error of a sample with its index, its file if that is known,
        and the next step.
        """
        file = file_of(dataset, index)
        text = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
        where = f" ({file})" if file and file not in text else ""
        return cls(
            f"Sample {index}{where} cannot be loaded: {type(error).__name__}: {text}. Replace or "
            "remove it: `python -m trainkit data check conf=NAME` lists all such samples. Or train "
            'without them: data.on_bad_sample=skip (in a script, Trainer(on_bad_sample="skip")).'
        )


def file_of(dataset: Any, index: int) -> str:
    """Return the file of a sample, or "": of torchvision's folders, of data sets with `files` or
    `paths`, and parts of them.

    A data set may say so itself, by a method `file_of(index)`.
    """
    if type(dataset) is Subset:
        return file_of(dataset.dataset, dataset.indices[index])
    if type(dataset) is ConcatDataset:
        part = bisect.bisect_right(dataset.cumulative_sizes, index)
        return file_of(
            dataset.datasets[part], index - (dataset.cumulative_sizes[part - 1] if part else 0)
        )
    if callable(own := getattr(dataset, "file_of", None)):
        return str(own(index))
    for name in ("samples", "imgs", "files", "paths"):
        held = getattr(dataset, name, None)
        if isinstance(held, (list, tuple)) and index < len(held):
            item = (
                held[index][0]
                if isinstance(held[index], (list, tuple)) and held[index]
                else held[index]
            )
            return str(item) if isinstance(item, str) or hasattr(item, "__fspath__") else ""
    return ""


def class_names_of(dataset: Any) -> list[str] | None:
    """Return the names of the classes by label, or None:
    `classes` of torchvision's data sets, and of parts of them.
    """
    if type(dataset) is Subset:
        return class_names_of(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return class_names_of(dataset.datasets[0])
    names = getattr(dataset, "classes", None)
    listed = isinstance(names, Sequence) and not isinstance(names, str) and len(names) > 0
    return [str(name) for name in names] if listed and names is not None else None
