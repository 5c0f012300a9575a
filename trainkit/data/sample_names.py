"""Names of samples for people: the file of a sample, one that is unreadable,
the classes of a data set's labels.
"""

from __future__ import annotations

import bisect
import sys
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


def note_sample(error: Exception, dataset: Any, index: int, epoch: int) -> None:
    """Add to an error of the user's data set which sample raised it; type and traceback stay."""
    own, place = _in_own(dataset, index)
    file = file_of(own, place)
    note = (
        f"Sample {place} of {type(own).__name__}{f' ({file})' if file else ''} raised this, with"
        f" the random numbers of epoch {epoch}. `python -m trainkit data check conf=NAME` lists all"
        " samples that raise."
    )
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif len(error.args) <= 1:  # Python 3.10 has no notes
        error.args = (_Text(f"{error}\n{note}"),)


class _Text(str):
    """A message that a KeyError, which shows its argument's repr, shows as it is."""

    def __repr__(self) -> str:
        return str(self)


def _in_own(dataset: Any, index: int) -> tuple[Any, int]:
    """Return the user's own data set of which a Subset or a ConcatDataset takes a sample,
    and the sample's index in it.
    """
    if isinstance(index, list):  # of a data set that reads several at once
        return dataset, index
    if type(dataset) is Subset:
        return _in_own(dataset.dataset, dataset.indices[index])
    if type(dataset) is ConcatDataset:
        part = bisect.bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        return _in_own(dataset.datasets[part], index - before)
    return dataset, index


def file_of(dataset: Any, index: int) -> str:
    """Return the file of a sample, or "": of torchvision's folders, of data sets with `files` or
    `paths`, and parts of them.

    A data set may say so itself, by a method `file_of(index)`.
    """
    dataset, index = _in_own(dataset, index)
    if callable(own := getattr(dataset, "file_of", None)):
        return str(own(index))
    for name in ("samples", "imgs", "files", "paths"):
        held = getattr(dataset, name, None)
        if isinstance(held, (list, tuple)) and index in range(len(held)):
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
