"""RayData: a Ray Dataset as training or evaluation data, read by Ray's workers and split over the
ranks by rank 0.

epoch -> rank 0: shuffle by (seed, epoch) -> blocks of exactly one batch, in order ->
streaming_split -> sent to the ranks

Batch b of an epoch goes to rank b % world_size, and step s takes the next `accumulate x ranks`
batches: as of a SplitStream, the same batches in the same steps on any number of ranks. Nothing is
left out; the last batch may be short.

Ranks need not be processes of Ray: the first one connects to the cluster of RAY_ADDRESS, or starts
one on its host, and the others join it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainkit.arguments import PositiveInt, checked
from trainkit.console import warning
from trainkit.data.order import mix
from trainkit.data.streams import OnMain, Stream, StreamSource
from trainkit.errors import ConfigError, DataError, TrainkitError
from trainkit.extensions.ray.connection import access, connect_ray, load_ray, take_access

_SEEDS = 2**31  # Ray shuffles by a seed of 32 bits
_PREFETCH = 2
_WHAT = "Ray Data"


@checked
class RayData(StreamSource):
    """A Ray Dataset to hand to `fit`, `validate`, `test` or `predict`, in place of a DataLoader.

    Args:
        dataset: a ray.data.Dataset, not split, or a function that returns one, which is called on
            rank 0 only: with several ranks, so that only rank 0 starts Ray. The data set's own
            steps (map, filter) run in Ray's workers.
        batch_size: the microbatch of one rank.
        columns: the batch is a tuple of these columns; by default a dict of all.
        shuffle: shuffle all samples at each epoch, by (seed, epoch). The whole data set passes
            through Ray's object store.
        transform: maps a batch (a dict of numpy arrays by column) to another of as many rows, in
            Ray's workers.
        num_samples: rows of the data set. By default they are counted: at once for Parquet, by
            reading files of other formats.
    """

    kind = "of Ray Data"

    def __init__(
        self,
        dataset: Any,
        batch_size: PositiveInt,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        num_samples: PositiveInt | None = None,
    ) -> None:
        if not callable(dataset):
            _check(dataset)
        self.batch_size = batch_size
        self.columns = columns
        self.shuffle = shuffle
        self.transform = transform
        self._dataset = dataset
        self._num_samples = num_samples

    def stream(
        self, limit: int | None, seed: int, ranks: tuple[int, int], declared: int, on_main: OnMain
    ) -> RayStream:
        return RayStream(self, limit, seed, ranks, declared, on_main)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches in this process, unshuffled."""
        return map(self.batch_of, self.read(self.blocks(None)))

    @property
    def dataset(self) -> Any:
        """The Ray Dataset; connects to Ray. Of rank 0."""
        connect()
        if callable(self._dataset):
            self._dataset = _check(self._dataset())
        return self._dataset

    @property
    def num_samples(self) -> int:
        """Rows of the data set. Counts them the first time; call it on rank 0."""
        if self._num_samples is None:
            self._num_samples = int(self.dataset.count())
        return self._num_samples

    def blocks(self, seed: int | None) -> Any:
        """Return the data set in blocks of exactly `batch_size` rows, the last one shorter;
        shuffled by `seed` unless None.
        """
        dataset = self.dataset if seed is None else self.dataset.random_shuffle(seed=seed % _SEEDS)
        dataset = dataset.repartition(target_num_rows_per_block=self.batch_size, strict=True)
        if self.transform is not None:
            dataset = dataset.map_batches(same_rows(self.transform), batch_size=None)
        dataset.context.execution_options.preserve_order = True
        return dataset

    def read(self, source: Any) -> Iterator[Any]:
        """Yield the batches of a data set in blocks, or of a share of it, as dicts of numpy arrays.

        Raises:
            DataError: a file cannot be read, or the transform fails.
        """
        try:
            yield from source.iter_batches(
                batch_size=self.batch_size, batch_format="numpy", prefetch_batches=_PREFETCH
            )
        except TrainkitError:
            raise
        except Exception as error:  # any of Ray's, of the reader's or of the transform's
            raise DataError(f"Ray Data: {_in_words(error)}") from error

    def batch_of(self, arrays: Mapping[str, Any]) -> Any:
        """Return a batch as tensors, in a dict or a tuple; columns that are no numbers stay lists.

        Raises:
            ConfigError: a column is missing.
        """
        if self.columns is None:
            return {name: _tensor(array) for name, array in arrays.items()}
        for name in self.columns:
            if name not in arrays:
                raise ConfigError(
                    f"RayData.columns has '{name}'; the data has {', '.join(arrays)}."
                )
        return tuple(_tensor(arrays[name]) for name in self.columns)


class RayStream(Stream):
    """A RayData as one rank reads it."""

    reading = "Ray Data reads it, and rank 0 splits its batches over the ranks"

    def __init__(
        self,
        data: RayData,
        limit: int | None,
        seed: int,
        ranks: tuple[int, int],
        declared: int,
        on_main: OnMain,
    ) -> None:
        """Build the stream of `data`; see StreamSource. Call it on all ranks.

        Raises:
            DataError: the data set has no samples, or cannot be read.
        """
        super().__init__(seed)
        self._data = data
        self._ranks = ranks
        self._declared = declared
        self._on_main = on_main
        self._end = None if limit is None else limit * declared
        self._share: Any = None  # of the present epoch: rank 0's keeps the split alive
        samples = on_main(lambda: _named(lambda: _counted(data)))
        if samples == 0:
            raise DataError("Ray Data: the data set has no samples.")
        batches = -(-int(samples) // data.batch_size)
        self._length = batches if self._end is None else min(batches, self._end)

    def per_step(self, accumulate: int) -> int:
        rank, size = self._ranks
        return len(range(rank, accumulate * self._declared, size))

    def num_steps(self, accumulate: int) -> int | None:
        return -(-self._length // (accumulate * self._declared))

    def steps(self, epoch: int, start: int, accumulate: int) -> Iterator[list[Any]]:
        """Yield this rank's batches of each step; see the module."""
        rank, size = self._ranks
        per_step = accumulate * self._declared
        batches = self._open(epoch, start, accumulate)
        for step in itertools.count(start):
            end = (
                (step + 1) * per_step
                if self._end is None
                else min((step + 1) * per_step, self._end)
            )
            first = step * per_step
            own = len(range(first + (rank - first) % size, end, size))
            yield list(itertools.islice(batches, own))

    def close(self) -> None:
        """Let go of the split; its processes in the cluster end."""
        self._share = None

    def _open(self, epoch: int, start: int, accumulate: int) -> Iterator[Any]:
        self.close()
        rank, size = self._ranks
        data = self._data
        skipped = start * accumulate * self._declared
        arrays = data.read(self._blocks(epoch) if size == 1 else self._split(epoch))
        own = len(range(rank, skipped, size))  # they are read by Ray, and become no tensors
        return map(data.batch_of, itertools.islice(arrays, own, None))

    def _blocks(self, epoch: int) -> Any:
        return self._data.blocks(mix(self._seed, epoch) if self._data.shuffle else None)

    def _split(self, epoch: int) -> Any:
        """Return this rank's share of an epoch, which rank 0 splits."""
        rank, size = self._ranks
        address, variables, shares = self._on_main(lambda: _named(lambda: self._send(epoch)))
        take_access(variables)
        joined = str(connect(address).get_runtime_context().gcs_address)
        if joined != address:
            raise ConfigError(
                f"Rank {rank} is connected to the Ray cluster at {joined}, and rank 0 to {address}:"
                " each has started its own. Give RayData a function that makes the data set, which"
                " is called on rank 0 only, or set RAY_ADDRESS."
            )
        if rank:
            self._share = pickle.loads(shares[rank])
        return self._share

    def _send(self, epoch: int) -> tuple[str, dict[str, str], list[bytes]]:
        """Split an epoch on rank 0; return the cluster's address, what a process needs to join it,
        and the shares, pickled.
        """
        shares = self._blocks(epoch).streaming_split(self._ranks[1], equal=False)
        self._share = shares[0]
        dumps = load_ray("ray.cloudpickle", _WHAT).dumps
        return (
            str(connect().get_runtime_context().gcs_address),
            access(),
            [dumps(share) for share in shares],
        )


def connect(address: str | None = None) -> Any:
    """Connect to the cluster with this address, see `connect_ray`; return the module ray."""
    ray = connect_ray(_WHAT, address)
    context = load_ray("ray.data", _WHAT).DataContext.get_current()
    if context.enable_progress_bars:
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # it lists its plan at each epoch
    return ray


def same_rows(transform: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Return the transform with an error if it changes the number of rows: the length of a run, and
    which batch is whose, are those of the rows before it.

    It is sent to Ray's workers, whose nodes may be without trainkit.
    """
    if isinstance(transform, type):  # Ray makes the object in its workers
        return transform

    def rows_of(batch: Any, default: int) -> int:
        column = next(iter(batch.values()), batch) if isinstance(batch, dict) else batch
        return len(column) if hasattr(column, "__len__") else default

    def transformed(batch: dict[str, Any]) -> Any:
        rows = rows_of(batch, 0)
        made = transform(batch)
        is_in_parts = isinstance(made, types.GeneratorType)
        parts = list(made) if is_in_parts else [made]
        there = sum(rows_of(part, rows) for part in parts)
        if there != rows:
            raise ValueError(
                f"RayData.transform made {there} rows of {rows}, and a run's steps are counted by"
                " the rows before it. Give a step that adds or drops rows to the data set, as"
                " dataset.map_batches(...) or .filter(...)."
            )
        return (part for part in parts) if is_in_parts else made

    return transformed


def _counted(data: RayData) -> int:
    """Return the rows, on rank 0; warn once of an order that no run repeats."""
    if step := unseeded_step(data.dataset):
        warning(
            f"RayData: the data set's own {step} has no seed, so its order differs each time that it"
            " is read: a run that resumes within an epoch reads other samples than it had left."
            " Leave it out, and give RayData(..., shuffle=True); or give it a seed."
        )
    return data.num_samples


def unseeded_step(dataset: Any) -> str:
    """Return the name of a step of a data set that shuffles without a seed, or "".

    Ray has no public name for a data set's steps.
    """
    last_step: Any = getattr(getattr(dataset, "_logical_plan", None), "dag", None)
    if not hasattr(last_step, "post_order_iter"):
        return ""
    for step in last_step.post_order_iter():
        chosen = getattr(step, "seed_config", None)
        if chosen is not None and getattr(chosen, "seed", 0) is None:
            return str(step.name)
    return ""


def _check(dataset: Any) -> Any:
    if not hasattr(dataset, "streaming_split"):
        kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        raise ConfigError(
            f"RayData.dataset is a {kind}; it must be a whole ray.data.Dataset, as"
            " ray.data.read_parquet(...) returns, or a function that returns one: trainkit splits"
            " it over the ranks."
        )
    return dataset


def _named(function: Callable[[], Any]) -> Any:
    """Call `function`; an error of Ray's or of a reader's becomes a DataError,
    which all ranks raise.
    """
    try:
        return function()
    except TrainkitError:
        raise
    except Exception as error:  # any: the other ranks wait for this one
        raise DataError(f"Ray Data: {_in_words(error)}") from error


def _in_words(error: BaseException) -> str:
    """Return the cause of an error of Ray's, which begins with the traces of its workers."""
    before = str(error).rpartition("\n\nThe above exception was the direct cause")[0]
    # of a transform: the line after the last one of its trace
    if own := re.findall(r"^ .*\n(\w.*)$", before, re.MULTILINE):
        return str(own[-1])
    place = -1
    while getattr(error, "cause", None) is not None:
        error, place = error.cause, 0  # type: ignore[attr-defined]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[place] if lines else 'no message'}"


def _tensor(array: Any) -> Any:
    """Return a column as a tensor; as a list if its rows are no numbers,
    or have different shapes.
    """
    numbers = _stacked(array)
    if numbers is None:
        return [_tensor(item) if isinstance(item, np.ndarray) else item for item in array]
    # Ray's are views of its shared memory
    return torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())


def _stacked(array: Any) -> np.ndarray[Any, Any] | None:
    """Return nested arrays, as Parquet's lists of lists are read, as one;
    None if they do not fit together.
    """
    if isinstance(array, list):  # of a block of pandas
        with contextlib.suppress(ValueError):  # of different lengths
            array = np.array(array)
    if not isinstance(array, np.ndarray):
        return None
    if array.dtype != object:
        return array if array.dtype.kind in "biufc" else None
    parts = [_stacked(item) for item in array]
    if not parts or any(
        part is None or part.shape != getattr(parts[0], "shape", None) for part in parts
    ):
        return None
    return np.stack(parts)  # type: ignore[arg-type]
