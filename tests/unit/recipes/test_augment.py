"""recipes/augment.py: what a sample is drawn as, which rank has which copy,
and what a batch is mixed to.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import TensorDataset

import trainkit
from recipes.augment import Augment, Mix, NoisyRandAugment, RepeatedOrder
from recipes.digits import Digits
from recipes.image_classifier import ImageClassifier
from recipes.synthetic import Synthetic
from tests.helpers.pages import ROOT
from tests.helpers.toy import quiet
from trainkit.data.order import SeededDataset
from trainkit.errors import ConfigError, TrainkitError


def images(num: int = 6) -> torch.Tensor:
    """Return images of one value each: image i has the value i everywhere."""
    return torch.arange(num).float().reshape(-1, 1, 1, 1).expand(-1, 3, 8, 8)


def test_mixup_is_a_weighted_mean_of_neighbours() -> None:
    """Samples 0 and 1 become s x own + (1 - s) x the other, with one s;
    the last of an odd batch stays as it is.
    """
    mixed, partner, share = Mix(mixup_alpha=1.0)(images(5), seed=0, step=3)
    assert partner.tolist() == [1, 0, 3, 2, 4]
    expected = [share * i + (1 - share) * partner[i].item() for i in range(5)]
    torch.testing.assert_close(mixed[:, 0, 0, 0], torch.tensor(expected))
    assert 0 < share < 1 and torch.equal(mixed[4], images(5)[4])


@pytest.mark.parametrize("step", range(12))
def test_cutmix_shares_are_those_of_the_pixels(step: int) -> None:
    """The share that targets get is that of the pixels that are a sample's own,
    at the border too.
    """
    mixed, _, share = Mix(cutmix_alpha=1.0)(images(2), seed=0, step=step)
    assert (
        share
        == (mixed[0, 0] == 0).float().mean().item()
        == (mixed[1, 2] == 1).float().mean().item()
    )


def test_a_step_mixes_by_seed_and_number_only() -> None:
    """The same step draws the same, whatever was drawn before it;
    other steps and seeds draw others, of both methods.
    """
    mix = Mix(mixup_alpha=1.0, cutmix_alpha=1.0)
    first = mix(images(), 0, 7)
    torch.rand(5)
    again, other = mix(images(), 0, 7), mix(images(), 1, 7)
    assert torch.equal(first[0], again[0]) and first[2] == again[2] != other[2]
    kinds = {bool((mix(images(2), 0, step)[0] % 1 != 0).any()) for step in range(12)}
    assert kinds == {False, True}  # cut, and blended


@pytest.mark.parametrize("options", [{"repeats": 4}, {"repeats": 3}])
def test_copies_are_in_one_group_apart(options: dict[str, int]) -> None:
    """Each group has its samples as often as asked (one copy less for some,
    if k does not divide it); neighbours differ.
    """
    torch.manual_seed(0)
    order = list(RepeatedOrder(64, within=16, **options))
    assert len(order) == len(set(order)) == 64
    groups = [[index % 64 for index in order[i : i + 16]] for i in range(0, 64, 16)]
    k = options["repeats"]
    for group in groups:
        counts = Counter(group)
        assert (
            len(counts) == -(-16 // k)
            and set(counts.values()) <= {k, k - 1}
            and (16 % k or set(counts.values()) == {k})
        )
        assert all(a != b for a, b in zip(group[::2], group[1::2], strict=True))
    assert sum(len(set(group)) for group in groups) == len(
        {sample for group in groups for sample in group}
    )


def test_copies_are_augmented_each_for_itself() -> None:
    """The copies of a sample in one epoch differ,
    and are the same again if the epoch is repeated.
    """
    data = Synthetic(
        image_size=16,
        num_samples=8,
        augment=Augment(policy="trivialaugment", random_erasing=1.0, repeats=2),
    )
    loader = data.train_dataloader()
    seeded = SeededDataset(loader.dataset, seed=0)
    (one, label), (two, same) = seeded[(0, 3)], seeded[(0, 3 + 8)]
    assert label == same and not torch.equal(one, two)
    assert torch.equal(one, seeded[(0, 3)][0])


def test_an_augment_without_transforms_leaves_tensors_alone() -> None:
    """By default digits stay a TensorDataset, which needs no seed for each sample."""
    plain = Digits()
    varied = Digits(augment=Augment(policy="randaugment", magnitude=6, magnitude_std=0.5))
    for data in (plain, varied):
        data.setup("fit")
    assert type(plain.train) is TensorDataset
    image, _ = varied.train[0]
    assert (image.shape, image.dtype) == (
        (3, 32, 32),
        torch.float32,
    ) and -1 <= image.min() < image.max() <= 1


def test_magnitudes_vary_around_the_mean_within_the_scale() -> None:
    """RandAugment's magnitude of an image is drawn, and cut at 0 and 10."""
    transform, magnitudes = NoisyRandAugment(9.5, 0.5), []
    for _ in range(60):
        transform(torch.zeros(3, 8, 8, dtype=torch.uint8))
        magnitudes.append(transform.magnitude)
    assert max(magnitudes) == 100 and 85 < sum(magnitudes) / 60 < 99 and min(magnitudes) < 95


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Augment(policy="autoaugment"),
            "data.augment.policy is 'autoaugment'; it must be one of 'randaugment'",
        ),
        (lambda: Augment(magnitude=11), "data.augment.magnitude is 11; it must be 10 or less"),
        (
            lambda: Augment(test_crop_ratio=1.2),
            "data.augment.test_crop_ratio is 1.2; it must be 1 or less",
        ),
        (
            lambda: Augment(repeats=0),
            "data.augment.repeats is 0; it must be a whole number, 1 or more",
        ),
        (Mix, "nothing is mixed"),
        (lambda: Mix(mixup=0.1), "task.mix.mixup is not a setting"),
        (
            lambda: classifier(mix="mixup"),
            "task.mix is 'mixup', and takes an object. Choose a file",
        ),
        (
            lambda: Synthetic(augment="randaugment"),
            "data.augment is 'randaugment', and takes an object. Choose a file of conf/augment",
        ),
    ],
)
def test_a_setting_without_meaning_is_refused(make: Any, text: str) -> None:
    """The error names the key and what is legal."""
    with pytest.raises(TrainkitError, match=text):
        make()


def classifier(**options: Any) -> ImageClassifier:
    """Return a tiny classifier of 5 classes."""
    torch.manual_seed(1)
    return ImageClassifier(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), partial(torch.optim.SGD, lr=0.1), **options
    )


def some(num: int = 20) -> TensorDataset:
    """Return images of noise with labels."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(num, 3, 8, 8, generator=generator),
        torch.randint(5, (num,), generator=generator),
    )


def test_soft_targets_of_a_mixed_batch(tmp_path: Path) -> None:
    """The loss is share x that of the own labels + the rest x that of the partners',
    as timm and torchvision have it.
    """
    mix, (batch, labels) = Mix(mixup_alpha=1.0), some(4).tensors
    task = classifier(mix=mix, label_smoothing=0.1, log_train_acc=True)
    mixed, partner, share = mix(batch, 0, 0)
    logits = task(mixed)
    losses = [
        nn.functional.cross_entropy(logits, y, label_smoothing=0.1).item()
        for y in (labels, labels[partner])
    ]
    right = [(logits.argmax(1) == y).float().mean().item() for y in (labels, labels[partner])]
    trainer = quiet(tmp_path, max_steps=1)
    trainer.fit(task, torch.utils.data.DataLoader(some(4), 4))
    values = trainer.callback_metrics
    assert values["train/loss_epoch"] == pytest.approx(
        share * losses[0] + (1 - share) * losses[1], rel=1e-5
    )
    assert values["train/acc"] == pytest.approx(share * right[0] + (1 - share) * right[1], abs=1e-6)


def test_bce_takes_each_class_for_itself(tmp_path: Path) -> None:
    """Both classes of a mixed image are present;
    the loss is the sum over classes, the mean over samples.
    """
    mix, (batch, labels) = Mix(mixup_alpha=1.0), some(4).tensors
    step = next(step for step in range(99) if 0.3 < mix(batch, 0, step)[2] < 0.7)
    mixed, partner, _ = mix(batch, 0, step)
    task = classifier(mix=mix, loss="bce")
    present = (
        torch.zeros(4, 5).scatter(1, labels[:, None], 1).scatter(1, labels[partner][:, None], 1)
    )
    logits = task(mixed)
    expected = (
        -(present * logits.sigmoid().log() + (1 - present) * (-logits).sigmoid().log())
        .sum(1)
        .mean()
    )
    targets = nn.functional.one_hot(labels, 5).float()
    torch.testing.assert_close(task._loss(logits, targets.lerp(targets[partner], 0.5)), expected)


def test_a_resumed_run_mixes_the_same(tmp_path: Path) -> None:
    """A run that stopped inside an epoch ends with the bits of the run that never stopped."""

    def weights(folder: str, *stops: int) -> torch.Tensor:
        for i, stop in enumerate(stops):
            task = classifier(mix=Mix(mixup_alpha=0.3, cutmix_alpha=1.0))
            augment, run_dir = Augment(repeats=2), str(tmp_path / folder)
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = trainkit.Trainer(max_steps=stop, run_dir=run_dir, **quiet)
            trainer.fit(task, augment.loader(some(), 4), ckpt_path="last" if i else None)
        return task.model[1].weight.detach()

    assert torch.equal(weights("whole", 8), weights("parts", 3, 8))


def test_options_of_a_model_by_name_need_a_name() -> None:
    """Weights by name beside an object would have no effect."""
    with pytest.raises(ConfigError, match="task.weights is for a model by name"):
        classifier(weights="DEFAULT")


def test_torchvisions_weights_are_validated_on_224_of_232_pixels() -> None:
    """augment=trivialaugment is the recipe of IMAGENET1K_V2, and has its crop."""
    given = OmegaConf.load(ROOT / "conf" / "augment" / "trivialaugment.yaml")
    ratio = given.data.augment.test_crop_ratio
    chosen = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.transforms()
    assert [Augment(test_crop_ratio=ratio).resize_of(224)] == chosen.resize_size == [232]
