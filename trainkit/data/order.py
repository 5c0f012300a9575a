"""The order of samples, and the random numbers of one sample: functions of (seed, epoch, index)
only; of a sample that comes again in an epoch, also of how often it has come.

So neither order nor augmentation depends on ranks, workers, or interruptions of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import operator
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from trainkit.data.permutation import MOST_HELD, Permutation
from trainkit.data.python_random import restore_python, save_python
from trainkit.data.sample_names import UnreadableSample, note_sample
from trainkit.errors import ConfigError, TrainkitError

Key = tuple[Any, ...]  # (epoch, index) of a sample, or (epoch, index, copy): see `key_of`
_MASK = 2**64 - 1
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)  # not of the sample
_EMPTY = 0x9E3779B97F4A7C15  # the hash of no numbers
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_set_numpy = np.random.mtrand.set_bit_generator
_get_numpy = np.random.mtrand.get_bit_generator
_TORCH_BYTES = torch.get_rng_state().nbytes
_torch_state = torch.default_generator.get_state
# making one takes as long as the random numbers of ten samples
_spare: list[np.random.MT19937] = []


def mix(*numbers: int) -> int:
    """Return a 63-bit hash of whole numbers (the finalizer of splitmix64,
    Steele et al. 2014, applied to each in turn).
    """
    state = _EMPTY
    for number in numbers:
        state = _mixed(state, number)
    return state >> 1


def _mixed(state: int, number: int) -> int:
    state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _number(index: Any) -> int:
    """Return a number for an index; for several, which a data set reads at once, a hash of them."""
    return index if isinstance(index, int) else mix(*index)


def whole_numbers(draws: Iterable[Any], sampler: Any) -> list[int]:
    """Return what a user's own sampler draws as indices.

    Raises:
        ConfigError: it draws something else.
    """
    try:
        return [operator.index(draw) for draw in draws]
    except TypeError as error:
        raise ConfigError(
            f"A {type(sampler).__name__} draws {draws!r:.80}; an order that is split over ranks is"
            " of indices, whole numbers. Draw these, and let the data set look up what belongs to"
            " them; or let each rank read a part of its own: trainkit.sharded(loader)."
        ) from error


class Repeating(Sequence[int]):
    """An order in which a sample may come several times."""

    @abstractmethod
    def copy_of(self, place: int) -> int:
        """Return a number, another one each time that a sample comes; 0 for a sample's own."""


class DrawnOrder(list[int], Repeating):
    """The order that a user's sampler has drawn, in which samples come again (see Repeating)."""

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(indices)
        self._copies = copies_in(indices)

    def copy_of(self, place: int) -> int:
        """See Repeating."""
        return self._copies[place]


def copies_in(indices: Iterable[Any]) -> list[int]:
    """Return for each index how often it has come before."""
    counts: Counter[int] = Counter()
    copies = []
    for index in map(_number, indices):
        copies.append(counts[index])
        counts[index] += 1
    return copies


def key_of(epoch: int, index: Any, copy: int) -> Key:
    """Return the key of a sample, by which SeededDataset reads it."""
    return (epoch, index, copy) if copy else (epoch, index)


def keys_at(epoch: int, order: Sequence[int], places: range, num_samples: int) -> list[Key]:
    """Return the keys of the samples at these places, as `indices_at` returns their indices."""
    indices = indices_at(order, places, num_samples)
    if not isinstance(order, Repeating):
        return [(epoch, index) for index in indices]
    copies = [order.copy_of(place % num_samples) for place in places]
    return [key_of(epoch, *each) for each in zip(indices, copies, strict=True)]


def shuffled(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the permutation of an epoch, int64 of shape [num_samples]."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


class _States:
    """The states of the generators of torch, numpy and random."""

    def __init__(self) -> None:
        self.torch = _torch_state()
        # numpy's generator is swapped as a whole: reading its state takes ten times as long as
        # everything else.
        self.numpy = _get_numpy()
        self.python = save_python()

    def put_back(self) -> None:
        torch.set_rng_state(self.torch)
        _set_numpy(self.numpy)
        restore_python(self.python)


def _seed(number: int) -> None:
    # The default generator itself: torch.manual_seed would also reset the GPUs' generators, which
    # the step uses.
    torch.default_generator.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Within the context torch, numpy and random may be seeded; afterwards they continue as before.

    One exception: numpy's legacy normals are drawn in pairs, and the second of a pair is lost.
    """
    before = _States()
    try:
        own = _spare.pop()
    except IndexError:
        own = np.random.MT19937(0)
    _set_numpy(own)
    try:
        yield
    finally:
        # Contexts of two threads, or of a generator that was left, may end in any order. The numpy
        # generator of one then stays in use: it is no spare one.
        nested = _get_numpy() is own
        before.put_back()
        if nested:
            _spare.append(own)


class Witness:
    """Sees whether torch, numpy or random draws between `begin` and `end`; kept for many batches,
    of which it costs 6 us each.

    Between the two numpy draws from a generator of the witness. A generator that has drawn is at
    another place of its numbers, or, after a multiple of 624 draws, has other numbers.
    """

    def __init__(self) -> None:
        self._numpy = np.random.MT19937(0)
        address = self._numpy.ctypes.state_address
        # of 624 numbers; the place follows them
        self._first = ctypes.c_uint32.from_address(address)
        self._place = ctypes.c_int.from_address(address + 624 * 4)
        self._at = self._place.value, self._first.value

    def begin(self) -> None:
        """Note the states, and take numpy's generator away."""
        self._before = _torch_state(), save_python(), _get_numpy()
        _set_numpy(self._numpy)

    def end(self) -> bool:
        """Return whether one has drawn, and put all back to where they were."""
        of_torch, of_python, of_numpy = self._before
        _set_numpy(of_numpy)
        at = self._place.value, self._first.value
        now = _torch_state()
        if (
            at == self._at
            and save_python() == of_python
            and not _memcmp(now.data_ptr(), of_torch.data_ptr(), _TORCH_BYTES)
        ):
            return False
        self._at = at
        torch.set_rng_state(of_torch)
        restore_python(of_python)
        return True


@contextlib.contextmanager
def random_numbers_of(seed: int, *key: int) -> Iterator[None]:
    """Within the context torch, numpy and random draw from the seed and a sample's key;
    afterwards they continue as in `apart`.
    """
    with apart():
        _seed(mix(seed, *key))
        yield


class OwnRandomNumbers:
    """A separate stream of random numbers:
    within its context torch, numpy and random draw from it and continue it.
    """

    def __init__(self, number: int) -> None:
        with apart():
            _set_numpy(np.random.MT19937(0))  # kept for good, so not the spare one
            _seed(mix(number, 0, 0))
            self._own = _States()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before = _States()
        self._own.put_back()
        try:
            yield
        finally:
            self._own = _States()
            before.put_back()


@contextlib.contextmanager
def own_numbers_of(parts: Sequence[Any], epoch: int) -> Iterator[None]:
    """Within the context the draws of the own generators of samplers and loaders depend on their
    seeds and the epoch only, not on earlier draws.
    """
    several = (getattr(part, "generator", None) for part in parts)
    own = {id(one): one for one in several if isinstance(one, torch.Generator)}  # each once
    before = [(generator, generator.get_state()) for generator in own.values()]
    for generator, _ in before:
        generator.manual_seed(mix(generator.initial_seed(), epoch))
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)  # its seed too


def set_epoch(epoch: int, *parts: Any) -> None:
    """Call `set_epoch` of the parts that have it: samplers and data sets, as accelerate does."""
    for part in parts:
        own = getattr(part, "set_epoch", None)
        if callable(own):
            own(epoch)


def may_draw(dataset: Any) -> bool:
    """Return whether a sample may be random.
    torch's in-memory data sets are not, and need no seed for each sample.
    """
    if type(dataset) is Subset:
        return may_draw(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return any(may_draw(part) for part in dataset.datasets)
    return type(dataset) is not TensorDataset


class SeededDataset(Dataset[Any]):
    """A map-style data set with random augmentation as a function of (seed, epoch, index), and of
    the copy, if a sample comes again.

    Its keys have the epoch (`key_of`), so persistent workers need not be informed of the epoch. To seed
    the generators for each sample takes 12 us, so it begins with the first batch that draws: this
    batch is read a second time, with its own random numbers.

    Attributes:
        first: the key of the first sample of the batch that was read last.
    """

    reads_users = True  # its `dataset`, which a worker_init_fn sees
    _latest: ClassVar[int] = 0  # id of the last that called set_epoch: two may share a data set

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._may_draw, self._draws = may_draw(dataset), False
        self._witness: Witness | None = None  # made where the samples are read: it is not pickled
        self.first: Key = 0, 0
        self._epoch: int | None = None  # that the data set knows

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def batches(self, keys: Iterator[list[Key]]) -> Iterator[list[Any]]:
        """Yield the samples of batches, each read when it is pulled: a data set may be filled by the
        training itself.
        """
        return map(self.__getitems__, keys)

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """Return the samples of a batch; a DataLoader calls this."""
        for epoch, index, *copy in keys[:1]:
            self.first = epoch, _number(index), *copy
        if self.first[0] != self._epoch or SeededDataset._latest != id(self):
            set_epoch(self.first[0], self.dataset)
            self._epoch = self.first[0]
            SeededDataset._latest = id(self)
        if not self._may_draw:
            return self._read(keys)
        if not self._draws:
            witness = self._witness = self._witness or Witness()
            witness.begin()
            try:
                batch = self._read(keys)
            except BaseException as error:
                self._draws = witness.end()
                if not self._draws or not isinstance(error, Exception):
                    raise
            else:
                self._draws = witness.end()
                if not self._draws:
                    return batch
        samples, seeded = [], _mixed(_EMPTY, self.seed)
        begun = {epoch: _mixed(seeded, epoch) for epoch in {key[0] for key in keys}}
        with apart():
            for epoch, index, *copy in keys:
                number = _mixed(begun[epoch], _number(index))
                for again in copy:
                    number = _mixed(number, again)
                _seed(number >> 1)  # mix(seed, epoch, index, ...)
                samples.append(self._sample(epoch, index))
        return samples

    def _read(self, keys: list[Key]) -> list[Any]:
        """Return the samples, as a DataLoader's worker reads them: at once, if the data set can."""
        at_once = getattr(self.dataset, "__getitems__", None)
        if at_once is None or len(keys) == 1:
            return [self._sample(*key[:2]) for key in keys]
        try:
            return list(at_once([key[1] for key in keys]))
        except Exception as error:
            of_all = error
        for key in keys:
            self._sample(*key[:2])  # the one at fault raises with its name
        raise of_all

    def _sample(self, epoch: int, index: int) -> Any:
        try:
            return self.dataset[index]
        except (OSError, SyntaxError) as error:
            # what PIL raises for a damaged file, and a missing file
            if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
                raise
            raise UnreadableSample.of(self.dataset, index, error) from error
        except TrainkitError:
            raise  # its message is whole
        except Exception as error:
            note_sample(error, self.dataset, index, epoch)
            raise


def epoch_order(
    num_samples: int, shuffle: bool, seed: int, epoch: int, drawn: Sequence[int] | None
) -> Sequence[int]:
    """Return the order of an epoch:
    that drawn by a user's own sampler, else a permutation or 0, 1, 2, ...
    """
    if drawn is not None:
        return drawn
    if not shuffle:
        return range(num_samples)
    if num_samples > MOST_HELD:
        return Permutation(num_samples, mix(seed, epoch))
    # numpy's: an element of a tensor would cost a tensor.
    return shuffled(num_samples, seed, epoch).numpy()  # type: ignore[return-value]


def indices_at(order: Sequence[int], places: range, num_samples: int) -> list[int]:
    """Return the indices at these places of the order of an epoch of `num_samples`;
    places wrap around at its end.
    """
    if places.stop > num_samples:
        return [int(order[place % num_samples]) for place in places]
    return [int(index) for index in order[places.start : places.stop]]
