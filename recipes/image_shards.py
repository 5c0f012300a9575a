"""Images in tar files of WebDataset's layout, from a folder or an object store:
KEY.jpg and KEY.cls, the label's number.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torchvision.transforms import v2

import trainkit
from recipes.augment import Augment, Repeated, as_given
from recipes.photographs import MEAN, STD, decode_image, of_channels
from trainkit.arguments import NonNegativeInt, PositiveFloat, PositiveInt
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.shards.cache import ShardCache
from trainkit.extensions.shards.dataset import Sample, ShardDataset
from trainkit.extensions.shards.index import Index, find_index, urls_of
from trainkit.extensions.shards.index_maker import index_for
from trainkit.extensions.shards.order import ShardOrder
from trainkit.extensions.shards.packer import KINDS
from trainkit.extensions.shards.store import ShardStore, is_local, joined
from trainkit.launch.environment import read_launcher

_GB = 10**9


class ImageShards(trainkit.DataModule):
    """Training: random resized crop and flip (He et al. 2016), or as `augment` says. Validation:
    resize, centre crop.

    Args:
        root: a folder or URL that holds train/ and val/, as `python -m trainkit data pack` writes
            them.
        urls: in place of root/train: tars by name, as s3://bucket/train-{000..127}.tar; * is any
            text.
        val_urls: in place of root/val.
        batch_size: the microbatch of one rank.
        num_classes: number of different labels.
        image_size: of the crops, in pixels.
        num_workers: processes of each rank that decode; None takes the rank's share of the cores.
        augment: how training images vary; None for crop and flip only.
        shuffle_shards: shards of a lane that are shuffled together.
        lanes: parts of the order that are read beside each other; a multiple of the number of ranks
            lets each read its own.
        cache_dir: where shards of an object store are kept on this host.
        cache_size_gb: so much at most, in 10^9 bytes.
        label: the extension of the label's file.
        storage_options: further arguments of fsspec's file system, as {anon: true}.
        mean: of red, green and blue, from 0 to 1, which normalizes an image; None for ImageNet's.
        std: of the same.
    """

    batch_shape = "images [B, 3, H, W] and labels [B]"

    def __init__(
        self,
        root: str | None = None,
        urls: str | list[str] | None = None,
        val_urls: str | list[str] | None = None,
        batch_size: PositiveInt = 32,
        num_classes: PositiveInt = 1000,
        image_size: PositiveInt = 224,
        num_workers: NonNegativeInt | None = None,
        augment: Augment | None = None,
        shuffle_shards: PositiveInt = 16,
        lanes: PositiveInt = 1,
        cache_dir: str | None = None,
        cache_size_gb: PositiveFloat = 100.0,
        label: str = "cls",
        storage_options: dict[str, Any] | None = None,
        mean: list[float] | None = None,
        std: list[PositiveFloat] | None = None,
    ) -> None:
        if (root is None) == (urls is None):
            problem = "are both null" if root is None else "are both set"
            raise ConfigError(
                f"data.root and data.urls {problem}; set one: data.root=s3://bucket/imagenet (train/"
                " and val/ in it)."
            )
        self.root, self.urls, self.val_urls = root, {"train": urls, "val": val_urls}, val_urls
        self.batch_size = batch_size
        self.num_classes = num_classes
        self.image_size = image_size
        self.num_workers = num_workers
        self.mean = of_channels("data.mean", mean, MEAN)
        self.std = of_channels("data.std", std, STD)
        self.augment = as_given("data.augment", augment) or Augment()
        self.shuffle_shards, self.lanes, self.label = shuffle_shards, lanes, label
        folder = (
            Path(cache_dir)
            if cache_dir
            else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trainkit-shards"
        )
        self.cache = ShardCache(folder, int(cache_size_gb * _GB), ShardStore(storage_options))

    @property
    def train_image_size(self) -> int:
        """Return the pixels of a training crop."""
        return self.augment.train_image_size or self.image_size

    def prepare_data(self) -> None:
        """Make an index of shards that have none, once on each host."""
        for part in ("train", "val"):
            self._index(part)

    def setup(self, stage: str) -> None:
        tail = [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(self.mean, self.std, inplace=True),
        ]
        self.val = self._dataset(
            "val", v2.Compose([*self.augment.of_validation(self.image_size), *tail]), 2
        )
        if stage == "fit":
            self.train = self._dataset(
                "train", self.augment.of_photographs(self.image_size, tail), self._num_open()
            )
            self._check_cache(self.train.index)

    def describe_input(self) -> dict[str, Any]:
        image = {
            "resize": self.augment.resize_of(self.image_size),
            "crop": self.image_size,
            "mean": self.mean,
            "std": self.std,
        }
        return {
            "image": image,
            **({"classes": self.val.classes} if self.val is not None and self.val.classes else {}),
        }

    def train_dataloader(self) -> DataLoader:
        index, repeats = self.train.index, self.augment.repeats
        step = self.augment.repeat_within or self.batch_size * trainkit.world_size()
        order = ShardOrder(
            index, self.shuffle_shards, self.lanes, self.batch_size, self._fetch_ahead
        )
        _say(order.describe(min(step // repeats, index.num_samples)))
        if repeats == 1:
            return DataLoader(self.train, self.batch_size, sampler=order, **self._loading())
        copies = RepeatedShards(order, repeats, step)
        return DataLoader(
            Repeated(self.train, repeats), self.batch_size, sampler=copies, **self._loading()
        )

    def val_dataloader(self) -> DataLoader | None:
        return (
            None if self.val is None else DataLoader(self.val, self.batch_size, **self._loading())
        )

    def test_dataloader(self) -> DataLoader | None:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader | None:
        return self.val_dataloader()

    def teardown(self, stage: str) -> None:
        self.cache.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on, beside seed and epoch."""
        listed = [(shard.name, shard.samples, shard.sha256) for shard in self.train.index.shards]
        turn = self.batch_size if self.lanes > 1 else 0
        shards = hashlib.sha256(repr(listed).encode()).hexdigest()[:16]
        return {
            "shards": shards,
            "shuffle_shards": self.shuffle_shards,
            "lanes": self.lanes,
            "batch_size": turn,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Say if the rest of an interrupted epoch comes in another order."""
        now = self.state_dict()
        changed = [key for key in now if state_dict.get(key, now[key]) != now[key]]
        if changed:
            before = ", ".join(
                f"{key}={state_dict[key] or 'any'} (now {now[key] or 'any'})" for key in changed
            )
            _say(
                f"the checkpoint's epoch has another order: {before}. In it some samples come"
                " twice, and as many do not come."
            )

    def _fetch_ahead(self, numbers: list[int]) -> None:
        self.cache.fetch_ahead(self.train.index.shards[number] for number in numbers)

    def _index(self, part: str) -> Index | None:
        """Return the index of a part, or None if there are no shards for validation."""
        patterns, store = self.urls[part], self.cache.store
        if self.root is None and patterns is None:
            return None
        if patterns is None:
            place = joined(str(self.root), part)
            index = find_index(place, store)
            if index is not None:
                return index
            if store.exists(joined(place, "packing.json")):
                raise DataError(
                    f"{place} is not complete: `data pack` was interrupted. The same command"
                    f" continues: python -m trainkit data pack IMAGES output={self.root}"
                )
            patterns = joined(place, "*.tar")
            if not store.matching(patterns):
                raise DataError(
                    f"data.root is '{self.root}', and {place} has neither index.json nor tars."
                    " Write them: python -m trainkit data pack IMAGES output=..., or name the tars"
                    " by data.urls."
                )
        key = (
            {"train": "data.urls", "val": "data.val_urls"}[part]
            if self.root is None
            else "data.root"
        )
        return index_for(urls_of(patterns, store, key), self.cache, self.label, _say)

    def _num_open(self) -> int:
        """Return how many shards a loader worker reads beside each other in training."""
        if self.lanes == self.augment.repeats == 1:
            return self.shuffle_shards  # a window is read to its end before the next one
        return 2 * self.shuffle_shards * self.lanes

    def _dataset(self, part: str, transform: v2.Transform, num_open: int) -> Any:
        index = self._index(part)
        if index is None:
            return None
        if index.classes and len(index.classes) != self.num_classes:
            shown = f"{', '.join(index.classes[:5])}{', ...' * (len(index.classes) > 5)}"
            raise ConfigError(
                f"data.num_classes is {self.num_classes}, but the shards of {part}/ have"
                f" {len(index.classes)} classes ({shown}). Set"
                f" data.num_classes={len(index.classes)}."
            )
        decoding = Decoding(transform, self.label, self.num_classes)
        return ShardDataset(index, self.cache, decoding, num_open)

    def _check_cache(self, index: Index) -> None:
        """Raise if the cache cannot hold what the shuffle reads at a time:
        each shard would be fetched again and again.
        """
        if is_local(index.shards[0].url):
            return
        launcher = read_launcher()
        lanes = (
            min(self.lanes, math.ceil(self.lanes * launcher.local_size / trainkit.world_size()))
            if self.lanes > 1
            else 1
        )
        size = max(shard.size for shard in index.shards)
        needed = min(lanes * (2 * self.shuffle_shards + 1) * size, index.num_bytes)
        if needed > self.cache.max_bytes:
            fits = max(1, int((self.cache.max_bytes / size / lanes - 1) / 2))
            raise ConfigError(
                f"data.cache_size_gb is {self.cache.max_bytes / _GB:g}, but"
                f" data.shuffle_shards={self.shuffle_shards} reads up to {needed / _GB:.3g} GB at a"
                " time on this host (those in use, and as many fetched ahead). Set"
                f" data.cache_size_gb={math.ceil(needed / _GB * 100) / 100:g} or"
                f" data.shuffle_shards={fits}."
            )

    def _loading(self) -> dict[str, Any]:
        workers = self.num_workers
        if workers is None:
            workers = max(1, len(os.sched_getaffinity(0)) // read_launcher().local_size)
        return {
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": torch.cuda.is_available(),
        }


class Decoding:
    """Makes (image, label) of a sample's files."""

    def __init__(self, transform: v2.Transform, label: str, num_classes: int) -> None:
        self.transform, self.label, self.num_classes = transform, label, num_classes

    def __call__(self, sample: Sample) -> tuple[Tensor, int]:
        kind = next((kind for kind in sample.files if f".{kind}" in KINDS), None)
        if kind is None or self.label not in sample.files:
            missing = (
                f"file of an image ({', '.join(KINDS)})"
                if kind is None
                else f"file {self.label}, the label (data.label)"
            )
            raise DataError(
                f"{sample.describe()} has no {missing}; it has {', '.join(sample.files) or 'none'}."
            )
        text = sample.files[self.label]
        try:
            label = int(text)
        except ValueError:
            label = -1
        if not 0 <= label < self.num_classes:
            raise DataError(
                f"{sample.describe()}: its label is {text[:20]!r}; it must be a number from 0 to"
                f" {self.num_classes - 1} (data.num_classes less 1)."
            )
        return self.transform(decode_image(sample.files[kind], sample.describe)), label


class RepeatedShards(Sampler[int]):
    """An order of `Repeated`: each `within` places hold a k-th as many samples of a ShardOrder,
    all once, then all again.
    """

    def __init__(self, base: ShardOrder, repeats: int, within: int) -> None:
        self.base, self.repeats, self.within = base, repeats, within

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order_of(int(torch.randint(2**62, ())), 0))

    def order_of(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the order of an epoch."""
        return _Copies(self.base.order_of(seed, epoch), self.repeats, self.within)


class _Copies(Sequence[int]):
    def __init__(self, order: Sequence[int], repeats: int, within: int) -> None:
        self.order, self.repeats, self.within = order, repeats, within

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        group, within = divmod(place, self.within)
        samples = math.ceil(min(self.within, len(self) - group * self.within) / self.repeats)
        copy, number = divmod(within, samples)
        return copy * len(self) + self.order[group * math.ceil(self.within / self.repeats) + number]


def _say(text: str) -> None:
    if read_launcher().is_main:
        print(f"data     {text}", flush=True)
