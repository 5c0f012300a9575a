"""The page of a classifier's test:
exact counts over all ranks, scores, calibration, and the worst samples as pictures.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torch import Tensor, nn
from torch.utils.data import Dataset

from recipes.image_classifier import ImageClassifier
from tests.helpers.threads import World
from tests.helpers.toy import loader, quiet
from trainkit.extensions.reports.classification.facts import Classified
from trainkit.extensions.reports.classification.results import ClassificationResults, png_of


class Pictures(Dataset[Any]):
    """Noise with labels, always the same."""

    classes = ["cat", "dog", "emu"]

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(num_samples, 3, 4, 5, generator=generator)
        self.files = [f"{i}.png" for i in range(num_samples)]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 3


class Found(ImageClassifier):
    """Keeps the results of its test."""

    found: Classified | None = None

    def on_test_end(self) -> None:
        self.found = self.results.over_ranks(self.trainer)
        super().on_test_end()


def classifier() -> Found:
    """Return a linear classifier, always the same."""
    task = Found(nn.Sequential(nn.Flatten(), nn.Linear(60, 3)), partial(torch.optim.SGD, lr=0.1))
    with torch.no_grad():
        task.model[1].weight.copy_(
            torch.randn(3, 60, generator=torch.Generator().manual_seed(2)) / 8
        )
        task.model[1].bias.zero_()
    return task


def results_of(folder: Path, ranks: int, num_samples: int = 31) -> Classified:
    """Return rank 0's results."""

    def one(engine: Any) -> Classified | None:
        task = classifier()
        quiet(folder, engine=engine).test(task, loader(Pictures(num_samples), 4))
        return task.found

    results = World(ranks).run(one)[0]
    assert results is not None
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_counts_are_exact_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    """The confusion matrix and the scores are scikit-learn's; each sample counts once."""
    results, data = results_of(tmp_path, ranks), Pictures(31)
    with torch.no_grad():
        logits = classifier().eval()(data.images)
    labels, predictions = np.arange(31) % 3, logits.argmax(1).numpy()
    assert results.confusion.tolist() == confusion_matrix(labels, predictions).tolist()
    assert results.accuracy == pytest.approx((labels == predictions).mean())
    expected = precision_recall_fscore_support(labels, predictions)
    scores = results.scores()
    for i, name in enumerate(("precision", "recall", "f1", "count")):
        assert [getattr(score, name) for score in scores] == pytest.approx(expected[i].tolist())
    assert results.bins[0].sum() == 31


def test_the_worst_samples_are_named(tmp_path: Path) -> None:
    """Those with the largest losses of all ranks, the largest first, with file and picture."""
    results, data = results_of(tmp_path, 2), Pictures(31)
    with torch.no_grad():
        losses = nn.functional.cross_entropy(
            classifier().eval()(data.images), torch.arange(31) % 3, reduction="none"
        )
    order = losses.argsort(descending=True)[:24].tolist()
    assert [sample.name for sample in results.worst] == [f"{i}.png" for i in order]
    assert results.worst[0].loss == pytest.approx(losses.max().item())
    assert all(sample.png.startswith(b"\x89PNG") for sample in results.worst)


def test_a_page_is_left(tmp_path: Path) -> None:
    """It holds all parts, names of classes, and pictures as data:
    nothing is loaded from elsewhere.
    """
    results_of(tmp_path, 1)
    text = (tmp_path / "reports" / "test.html").read_text()
    for part in (
        "Confusion",
        "Scores by class",
        "Calibration",
        "Worst samples",
        "calibration error",
        "emu, predicted",
    ):
        assert part in text
    assert text.count('<img src="data:image/png;base64,') == 24


def test_calibration_error_is_that_of_its_definition() -> None:
    """Two bins: confidence 0.9 with half of it right, and 0.6 with all of it."""
    bins = np.zeros((3, 15))
    bins[:, 13], bins[:, 9] = (10, 9.0, 5), (10, 6.0, 10)
    classified = Classified(["a", "b"], np.diag([15.0, 5.0]), bins, [])
    assert classified.calibration_error == pytest.approx((10 * 0.4 + 10 * 0.4) / 20)
    assert classified.confused(5) == []


def test_a_class_that_never_occurs_has_no_scores() -> None:
    """It neither divides by zero nor counts as bad."""
    _, never = Classified(
        ["a", "b"], np.array([[3.0, 0.0], [0.0, 0.0]]), np.zeros((3, 15)), []
    ).scores()
    assert never.count == 0 and all(
        score != score for score in (never.precision, never.recall, never.f1)
    )


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_picture_is_a_png(channels: int) -> None:
    """Its pixels are the image's, stretched to the whole range; large ones are made smaller."""
    image = torch.linspace(-2, 2, 12).view(1, 3, 4).expand(channels, -1, -1)
    pixels = np.asarray(Image.open(io.BytesIO(png_of(image))))
    assert pixels.shape == (3, 4, 3) and (pixels.min(), pixels.max()) == (0, 255)
    assert Image.open(io.BytesIO(png_of(torch.rand(channels, 448, 224)))).size == (112, 224)


def test_results_of_other_inputs_have_no_pictures() -> None:
    """A classifier of rows of numbers is counted all the same."""
    results = ClassificationResults()
    results.add(torch.randn(4, 7), torch.randn(4, 2), torch.tensor([0, 1, 1, 0]), None)
    assert [(sample.name, sample.png) for sample in results._samples(None)] == [("", b"")] * 4
