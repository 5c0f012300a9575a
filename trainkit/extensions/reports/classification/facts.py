"""What a test of a classifier found, and the figures derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float64]


@dataclass(frozen=True)
class WorstSample:
    """A sample with a large loss; `png` is its picture, or empty."""

    loss: float
    label: int
    prediction: int
    probability: float  # of the prediction
    name: str
    png: bytes


@dataclass(frozen=True)
class ClassScore:
    """Precision, recall and F1 of a class; NaN if it never occurs, or is never predicted."""

    name: str
    count: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Classified:
    """A test's results over all ranks.

    Attributes:
        names: of the classes.
        confusion: samples by (label, prediction), [C, C].
        bins: samples, sum of confidences and correct ones by confidence, [3, bins].
        worst: the samples with the largest losses, the largest first.
    """

    names: Sequence[str]
    confusion: Counts
    bins: Counts
    worst: Sequence[WorstSample]

    @property
    def num_samples(self) -> int:
        """Samples tested."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Share of samples with a prediction equal to their label."""
        return float(self.confusion.trace() / max(1.0, self.confusion.sum()))

    @property
    def calibration_error(self) -> float:
        """Expected calibration error (Guo et al. 2017, equation 3):
        mean of |accuracy - confidence| of a sample's bin.
        """
        _, confidences, correct = self.bins
        return float(np.abs(correct - confidences).sum() / max(1.0, self.bins[0].sum()))

    def scores(self) -> list[ClassScore]:
        """Return the scores of each class."""
        right = self.confusion.diagonal()
        of_label = self.confusion.sum(1)
        predicted = self.confusion.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            precision = right / predicted
            recall = right / of_label
            f1 = 2 * right / (predicted + of_label)
        rows = zip(self.names, of_label, precision, recall, f1, strict=True)
        return [
            ClassScore(name, int(count), float(p), float(r), float(f))
            for name, count, p, r, f in rows
        ]

    def confused(self, most: int) -> list[tuple[str, str, int]]:
        """Return (label, prediction, samples) of the pairs that are confused most often."""
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        order = np.argsort(wrong, axis=None, kind="stable")[::-1][:most]
        pairs = [divmod(int(place), len(self.names)) for place in order]
        return [
            (self.names[i], self.names[j], int(wrong[i, j])) for i, j in pairs if wrong[i, j] > 0
        ]
