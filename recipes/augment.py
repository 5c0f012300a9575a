"""Augmentation of images: random transforms of one sample, repeats of a sample in a batch, mixes of
two samples.

Augment           what the data does: transforms of a sample (from its own random numbers: seed, epoch, index), and repeats
Repeated          a data set with k indices for each sample, so that each copy has its own random numbers
RepeatedOrder     the order that puts a sample's copies into one step
Mix               what the Task does: MixUp and CutMix of a batch (from seed and step)
as_given          what a config has in the place of an Augment or a Mix
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import v2

import trainkit
from trainkit.arguments import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    checked,
    show,
)
from trainkit.data.order import mix
from trainkit.data.sample_names import file_of

_Part = TypeVar("_Part")
_BINS = 100  # magnitudes: 0.1 of RandAugment's 10


class NoisyRandAugment(v2.RandAugment):
    """RandAugment (Cubuk et al. 2020), two operations; the magnitude of an image is drawn around
    the given one, as timm does.

    torchvision's 14 operations; timm's "increasing" set has two more, and leaves out each with
    probability 0.5.
    """

    def __init__(self, magnitude: float, std: float) -> None:
        super().__init__(num_ops=2, num_magnitude_bins=_BINS + 1)
        self.mean, self.std = magnitude, std

    def forward(self, *inputs: Any) -> Any:
        drawn = self.mean + self.std * torch.randn(()).item()
        self.magnitude = round(min(max(drawn, 0), 10) * _BINS / 10)
        return super().forward(*inputs)


@checked
class Augment:
    """How training images vary.

    Args:
        policy: randaugment (Cubuk et al. 2020), trivialaugment (TrivialAugmentWide, Mueller &
            Hutter 2021), or None.
        magnitude: of randaugment, from 0 to 10, as timm's; torchvision's own is of 30.
        magnitude_std: standard deviation of an image's magnitude around it.
        random_erasing: probability to set a rectangle to zeros (Zhong et al. 2020).
        crop_and_flip: of image folders: random resized crop and horizontal flip (He et al. 2016),
            else as in validation.
        train_image_size: of image folders: the crop's pixels in training; None for data.image_size.
        test_crop_ratio: of image folders: the share of the resized image that validation sees.
        repeats: copies of a sample in a step, each augmented for itself (Hoffer et al. 2020). An
            epoch has as many samples as without, of a part of the data set.
        repeat_within: samples over which copies are spread, a multiple of a round of microbatches:
            trainer.global_batch_size, if that is set. None for the microbatches of all ranks.
    """

    config_key = "data.augment"

    def __init__(
        self,
        policy: Literal["randaugment", "trivialaugment"] | None = None,
        magnitude: NonNegativeFloat = 9.0,
        magnitude_std: NonNegativeFloat = 0.0,
        random_erasing: Fraction = 0.0,
        crop_and_flip: bool = True,
        train_image_size: PositiveInt | None = None,
        test_crop_ratio: PositiveFloat = 0.875,
        repeats: PositiveInt = 1,
        repeat_within: PositiveInt | None = None,
    ) -> None:
        if magnitude > 10 or test_crop_ratio > 1:
            key, value, most = (
                ("magnitude", magnitude, 10)
                if magnitude > 10
                else ("test_crop_ratio", test_crop_ratio, 1)
            )
            raise trainkit.TrainkitError(
                f"data.augment.{key} is {value}; it must be {most} or less."
            )
        self.policy = (
            [NoisyRandAugment(magnitude, magnitude_std)] if policy == "randaugment" else []
        )
        self.policy += [v2.TrivialAugmentWide()] if policy == "trivialaugment" else []
        self.erasing = [v2.RandomErasing(random_erasing)] if random_erasing else []
        self.crop_and_flip = crop_and_flip
        self.train_image_size = train_image_size
        self.test_crop_ratio = test_crop_ratio
        self.repeats, self.repeat_within = repeats, repeat_within

    def of_photographs(self, image_size: int, tail: list[v2.Transform]) -> v2.Transform:
        """Return crop, flip, policy, `tail` (to normalized numbers), erasing:
        from uint8 [3, H, W] to float32.
        """
        size = self.train_image_size or image_size
        crop = (
            [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
            if self.crop_and_flip
            else self.of_validation(size)
        )
        return v2.Compose([*crop, *self.policy, *tail, *self.erasing])

    def of_validation(self, image_size: int) -> list[v2.Transform]:
        """Return resize and centre crop."""
        return [v2.Resize(self.resize_of(image_size)), v2.CenterCrop(image_size)]

    def resize_of(self, image_size: int) -> int:
        """Return the length of an image's shorter side before the centre crop of validation."""
        return int(image_size / self.test_crop_ratio)

    def of_tensors(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return a data set of (image from -1 to 1, label) with policy and erasing;
        itself if there are neither.
        """
        return Augmented(dataset, self) if self.policy or self.erasing else dataset

    def loader(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
        """Return a loader of training data, with repeats."""
        if self.repeats == 1:
            return DataLoader(dataset, batch_size, shuffle=True, **options)
        within = self.repeat_within or batch_size * trainkit.world_size()
        order = RepeatedOrder(len(dataset), self.repeats, within)  # type: ignore[arg-type]
        return DataLoader(Repeated(dataset, self.repeats), batch_size, sampler=order, **options)


class Augmented(Dataset[Any]):
    """Images from -1 to 1 in memory, with a policy (which needs uint8) and erasing."""

    def __init__(self, dataset: Dataset[Any], augment: Augment) -> None:
        self.dataset = dataset
        back = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
        self.transform = v2.Compose([*augment.policy, *back, *augment.erasing])

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image, label = self.dataset[index]
        return self.transform(((image / 2 + 0.5).clamp(0, 1) * 255).round().byte()), label


class Repeated(Dataset[Any]):
    """A data set k times one after another:
    index i + copy x len is sample i, with random numbers of its own.
    """

    def __init__(self, dataset: Dataset[Any], repeats: int) -> None:
        self.dataset, self.repeats, self.num_samples = dataset, repeats, len(dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.repeats * self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % self.num_samples]

    def file_of(self, index: int) -> str:
        """Return the file of a sample, for messages."""
        return file_of(self.dataset, index % self.num_samples)


class RepeatedOrder(Sampler[int]):
    """Indices of `Repeated`: each `within` places hold a k-th as many samples, all once, then all
    again.

    So copies go to different ranks, and neighbours (which Mix pairs) differ. If k does not
    divide a group, its last samples have one copy less. An epoch has `num_samples` places: it sees
    a k-th of the data set.
    """

    def __init__(self, num_samples: int, repeats: int, within: int) -> None:
        self.num_samples, self.repeats, self.within = num_samples, repeats, within

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        drawn = iter(torch.randperm(self.num_samples).tolist())
        for start in range(0, self.num_samples, self.within):
            size = min(self.within, self.num_samples - start)
            samples = [next(drawn) for _ in range(math.ceil(size / self.repeats))]
            yield from [
                copy * self.num_samples + sample
                for copy in range(self.repeats)
                for sample in samples
            ][:size]


@checked
class Mix:
    """MixUp (Zhang et al. 2018) and CutMix (Yun et al. 2019) of neighbours in a batch: samples 0
    and 1, 2 and 3, ...

    Share, method and rectangle are one draw for a whole step, from the run's seed and the step's
    number. So a resumed run repeats them, and N ranks mix the global batch as one does, if each
    microbatch has an even number of samples (in an odd one the last sample is not mixed). If both
    methods are on, each step uses one of them, with probability 0.5.

    Args:
        mixup_alpha: of the Beta distribution of the share; 0 for no MixUp.
        cutmix_alpha: of CutMix.
    """

    config_key = "task.mix"

    def __init__(
        self, mixup_alpha: NonNegativeFloat = 0.0, cutmix_alpha: NonNegativeFloat = 0.0
    ) -> None:
        self.alphas = [
            (alpha, cuts) for alpha, cuts in ((mixup_alpha, False), (cutmix_alpha, True)) if alpha
        ]
        if not self.alphas:
            raise trainkit.TrainkitError(
                "task.mix: mixup_alpha and cutmix_alpha are 0, so nothing is mixed: task.mix=null."
            )

    def __call__(self, images_BCHW: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor, float]:
        """Return mixed images, the places of their partners [B], and a sample's own share;
        the rest is its partner's.
        """
        draw = random.Random(mix(seed, step))
        alpha, cuts = draw.choice(self.alphas)
        share = draw.betavariate(alpha, alpha)
        size = len(images_BCHW)
        partner_B = (torch.arange(size, device=images_BCHW.device) ^ 1).clamp(max=size - 1)
        other_BCHW = images_BCHW[partner_B]
        if not cuts:
            return images_BCHW.lerp(other_BCHW, 1 - share), partner_B, share
        top, bottom = _side(images_BCHW.shape[2], share, draw.random())
        left, right = _side(images_BCHW.shape[3], share, draw.random())
        mixed_BCHW = images_BCHW.clone()
        mixed_BCHW[:, :, top:bottom, left:right] = other_BCHW[:, :, top:bottom, left:right]
        return (
            mixed_BCHW,
            partner_B,
            1 - (bottom - top) * (right - left) / (images_BCHW.shape[2] * images_BCHW.shape[3]),
        )


def _side(pixels: int, share: float, centre: float) -> tuple[int, int]:
    """Return where CutMix's rectangle begins and ends:
    sqrt(1 - share) of the side around a centre, cut at the border.
    """
    half = pixels * math.sqrt(1 - share) / 2
    return max(0, round(centre * pixels - half)), min(pixels, round(centre * pixels + half))


def as_given(key: str, part: _Part) -> _Part:
    """Return what a config has at `key`, which takes an object or null.

    Raises:
        TrainkitError: it is a plain value, as a policy's name.
    """
    if isinstance(part, (str, int, float)):
        raise trainkit.TrainkitError(
            f"{key} is {show(part)}, and takes an object. Choose a file of conf/augment, as"
            f" augment=randaugment, or set its values: {key}._target_=..."
        )
    return part
