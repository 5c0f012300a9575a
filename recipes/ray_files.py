"""Files that Ray Data reads (Parquet, images, WebDataset, CSV, ...):
decoded and shuffled by Ray's workers on all its nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trainkit
from trainkit.arguments import PositiveInt
from trainkit.errors import ConfigError, DataError, did_you_mean
from trainkit.extensions.ray.connection import load_ray
from trainkit.extensions.ray.data import RayData


class RayFiles(trainkit.DataModule):
    """Training data is shuffled by (seed, epoch); validation data is read in order.

    Args:
        train: a file, a folder or a URL of training data, or a list of them.
        val: of validation data; null for none.
        reader: parquet, images, webdataset, csv, json, numpy, tfrecords, ...: Ray's
            ray.data.read_<reader>.
        options: further arguments of the reader.
        batch_size: the microbatch of one rank.
        columns: the batch is a tuple of these columns, as [image, label]; by default a dict of all.
        shuffle: shuffle the training data at each epoch; it passes through Ray's object store.
        transform: maps a batch (a dict of numpy arrays) to another, in Ray's workers.
        num_samples: rows of the training data; by default they are counted.
        num_classes: for the model's config to refer to.
        image_size: for the model's config to refer to.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        reader: str = "parquet",
        options: dict[str, Any] | None = None,
        batch_size: PositiveInt = 32,
        columns: list[str] | None = None,
        shuffle: bool = True,
        transform: Callable[..., Any] | None = None,
        num_samples: PositiveInt | None = None,
        num_classes: PositiveInt | None = None,
        image_size: PositiveInt | None = None,
    ) -> None:
        self.train, self.val, self.reader, self.options = train, val, reader, options or {}
        self.batch_size = batch_size
        self.columns = columns
        self.shuffle = shuffle
        self.transform = transform
        self.num_samples, self.num_classes, self.image_size = num_samples, num_classes, image_size

    def train_dataloader(self) -> RayData:
        return self._data("train", self.train, self.shuffle, self.num_samples)

    def val_dataloader(self) -> RayData | None:
        return None if self.val is None else self._data("val", self.val, False, None)

    def test_dataloader(self) -> RayData | None:
        return self.val_dataloader()

    def predict_dataloader(self) -> RayData | None:
        return self.val_dataloader()

    def _data(
        self, key: str, paths: str | list[str], shuffle: bool, num_samples: int | None
    ) -> RayData:
        dataset = functools.partial(self._read, key, paths)  # called on rank 0
        return RayData(dataset, self.batch_size, self.columns, shuffle, self.transform, num_samples)

    def _read(self, key: str, paths: str | list[str]) -> Any:
        module = load_ray("ray.data", "data=ray")
        readers = [name.removeprefix("read_") for name in dir(module) if name.startswith("read_")]
        if self.reader not in readers:
            raise ConfigError(
                f"data.reader is '{self.reader}'; it must be one of"
                f" {', '.join(readers)}.{did_you_mean(self.reader, readers)}"
            )
        try:
            return getattr(module, f"read_{self.reader}")(_absolute(paths), **self.options)
        except TypeError as error:
            raise ConfigError(
                f"data.options: ray.data.read_{self.reader} refuses its arguments: {error}"
            ) from error
        except (OSError, ValueError) as error:
            raise DataError(f"data.{key} is {paths}, and Ray cannot read it: {error}") from error


def _absolute(paths: str | list[str]) -> str | list[str]:
    """Return local paths as seen from here: Ray's workers have folders of their own."""
    if isinstance(paths, list):
        return [str(_absolute(path)) for path in paths]
    return paths if "://" in paths else str(Path(paths).absolute())
