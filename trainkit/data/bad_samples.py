"""Bad samples: those that cannot be loaded, as a truncated image. `on_bad_sample=skip` leaves them
out of their batch.

    GuardedDataset    in the loader's process: a BadSample stands for a sample that raises
    GuardedCollate    the others as the user's own batch; a Rest if samples are missing
    BadSamples        what all ranks have skipped so far: the log, and the limit

Without the setting none of them is built. With it, the ranks sum the samples of each step before
its first microbatch, as they do for a stream, so that the weights of a step that lost samples are
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate

from trainkit.console import plural
from trainkit.data.order import SeededDataset
from trainkit.data.sample_names import UnreadableSample, file_of
from trainkit.errors import DataError

DEFAULT_LIMIT = 100


@dataclass(frozen=True)
class BadSample:
    """A sample that raised: its index in the data set (None of a stream),
    its file if known, and the error.
    """

    index: int | None
    file: str
    error: str

    def describe(self) -> str:
        """Return index, file and error in one line; the file once."""
        where = "" if self.index is None else f"index {self.index}"
        named = self.file and self.file not in self.error
        return ": ".join(
            filter(
                None,
                (f"{where}, {self.file}" if named and where else where or self.file, self.error),
            )
        )


class Rest(NamedTuple):
    """What is left of a batch without its bad samples; `batch` is None if nothing is."""

    batch: Any
    bad: list[BadSample]


class GuardedDataset(Dataset[Any]):
    """A seeded data set that returns a BadSample in place of one that raises."""

    reads_users = True  # its `dataset`, which a worker_init_fn sees

    def __init__(self, dataset: SeededDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.dataset[key]
        except MemoryError:
            raise  # of the machine, not of the sample
        except Exception as error:  # any: a decoder's errors have no common type
            own = (isinstance(error, UnreadableSample) and error.__cause__) or error
            index = key[1] if isinstance(key[1], int) else None
            file = "" if index is None else file_of(self.dataset.dataset, index)
            return BadSample(
                index, file or str(getattr(own, "filename", None) or ""), in_a_line(own)
            )

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        """Return the samples of a batch, all at once if none raises; a DataLoader calls this."""
        try:
            return self.dataset.__getitems__(keys)
        except MemoryError:
            raise
        except Exception:  # a sample's random numbers are its own, so that it may be drawn again
            return [self[key] for key in keys]


class GuardedCollate:
    """Makes the user's batch of the samples that did not raise."""

    def __init__(self, own: Callable[[Any], Any] | None) -> None:
        self.own = own or default_collate

    def __call__(self, samples: Any) -> Any:
        """Return the user's batch, or a Rest if samples are missing."""
        if isinstance(samples, BadSample):  # of a data set that makes its batches itself
            return Rest(None, [samples])
        bad = (
            [sample for sample in samples if isinstance(sample, BadSample)]
            if isinstance(samples, list)
            else []
        )
        if not bad:
            return self.own(samples)
        good = [sample for sample in samples if not isinstance(sample, BadSample)]
        return Rest(self.own(good) if good else None, bad)


def rest_of(batch: Any) -> Rest:
    """Return what a guarded loader yielded as a Rest."""
    return batch if isinstance(batch, Rest) else Rest(batch, [])


class BadSamples:
    """The samples that a stage skips, on all ranks: reports each once, and ends the run beyond the
    limit.

    Args:
        limit: different samples that may be skipped.
        sum_over_ranks: sums a host number (a collective).
        gather: returns the objects of all ranks (a collective).
        say: prints on rank 0.

    Attributes:
        last: the last one reported; the same on all ranks.
    """

    def __init__(
        self,
        limit: int,
        sum_over_ranks: Callable[[int], int],
        gather: Callable[[Any], list[Any]],
        say: Callable[[str], None],
    ) -> None:
        self.limit = limit
        self.sum_over_ranks = sum_over_ranks
        self._gather = gather
        self._say = say
        # trainer.sync_batchnorm: a rank without a sample would be waited for
        self.needs_every_microbatch = False
        self.last: BadSample | None = None
        self._seen: set[tuple[str, int | None, str]] = set()

    def check(self, name: str, own: Sequence[BadSample]) -> None:
        """Raise on this rank alone if it has more bad samples than all may have: the pass need not
        reach its end.

        Raises:
            DataError: they are too many.
        """
        if len({(bad.index, bad.error) for bad in own}) > self.limit:
            raise self._too_many(name, len(own), own[-1])

    def share(self, name: str, own: Sequence[BadSample], lost: bool = False) -> None:
        """Report the bad samples of all ranks. Call it on all ranks.

        Args:
            name: of the data, as "train_dataloaders".
            own: of this rank.
            lost: whether all samples of one of this rank's microbatches are bad.

        Raises:
            DataError: more samples than the limit are bad; on all ranks.
        """
        for samples, loses in self._gather((list(own), lost)):
            if loses and self.needs_every_microbatch:
                raise DataError(
                    f"{name}: all samples of a rank's microbatch are bad, and"
                    " trainer.sync_batchnorm needs each rank in each microbatch. The last:"
                    f" {samples[-1].describe().rstrip('.')}. Remove the bad samples, or leave"
                    " sync_batchnorm out."
                )
            for bad in samples:
                key = (name, bad.index, bad.file or bad.error)
                if key not in self._seen:
                    self._seen.add(key)
                    self.last = bad
                    if len(self._seen) > self.limit:
                        raise self._too_many(name, len(self._seen), bad)
                    self._say(
                        f"Skipped bad sample {len(self._seen)} of at most {self.limit} ({name}):"
                        f" {bad.describe()}"
                    )

    def _too_many(self, name: str, count: int, last: BadSample) -> DataError:
        return DataError(
            f"on_bad_sample_limit is {self.limit}, and {plural(count, 'sample')} could not be"
            f" loaded; the last, of {name}: {last.describe().rstrip('.')}. `python -m trainkit data"
            " check conf=NAME` lists them all. Replace or remove them, or raise"
            " data.on_bad_sample_limit."
        )


def in_a_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text; trainkit's own texts need no type."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return text if isinstance(error, DataError) else f"{type(error).__name__}: {text}"
