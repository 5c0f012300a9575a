"""The records of a run's ranks, and what of them is to be compared: pairs of one process's numbers and
the ranks'.

EngineRecording  of one run
SketchPair       one module's output, or one weight, in one step
outputs          pairs of a step's outputs, in the order of execution
weights          pairs of its gradients, weights or buffers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.extensions.check_engine.recorder import LOSS

Key = Any  # of a row: a sample, or the samples of a microbatch


@dataclass(frozen=True)
class EngineRecording:
    """What EngineRecorder has written on each rank."""

    ranks: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> EngineRecording:
        """Read a folder of records."""
        files = sorted(folder.glob("rank*.pt"), key=lambda path: int(path.stem[4:]))
        return cls([torch.load(path, weights_only=True) for path in files])

    @property
    def first(self) -> Mapping[str, Any]:
        """Rank 0's record."""
        return self.ranks[0]

    @property
    def tensor_size(self) -> int:
        """Ranks that read the same samples, and share widths, or tokens."""
        return int(self.first["tensor_size"])

    @property
    def group(self) -> str:
        """What such ranks are called: tensor, or context."""
        return str(self.first.get("group", "tensor"))

    @property
    def elsewhere(self) -> list[Sequence[str]]:
        """Of each rank, the weights and buffers that other pipeline stages hold."""
        return [rank["elsewhere"] for rank in self.ranks]

    @property
    def steps(self) -> int:
        """Steps that are recorded."""
        return min(len(rank["steps"]) for rank in self.ranks)

    @property
    def model_size(self) -> int:
        """Ranks that hold one model, and read the same samples: tensor ranks of each stage."""
        return self.tensor_size * int(self.first["pipeline_size"])

    def of_place(self, step: int, place: int) -> list[Mapping[str, Any]]:
        """Return a step's microbatches in the order of one process, as the ranks have seen them
        that have this place among those of their model.
        """
        own = [rank["steps"][step]["microbatches"] for rank in self.ranks[place :: self.model_size]]
        rounds = max(map(len, own))
        return [each[i] for i in range(rounds) for each in own if i < len(each)]

    def microbatches(self, step: int, index: int = 0) -> list[Mapping[str, Any]]:
        """Return a step's microbatches in the order of one process, as the ranks with the place
        `index` in their tensor groups have seen them: all stages, the first of which are last by
        rank.
        """
        places = range(index, self.model_size, self.tensor_size)
        stages = [self.of_place(step, place) for place in reversed(places)]
        return [_joined(parts) for parts in zip(*stages, strict=True)]

    def samples(self, step: int) -> list[str]:
        """Return the samples of a step, in the order of one process."""
        return [key for each in self.microbatches(step) for key in each["samples"]]

    def draws(self) -> dict[str, str]:
        """Return the modules that draw random numbers -> the function."""
        drawing: dict[str, str] = {}
        for rank in self.ranks:
            for step in rank["steps"]:
                for microbatch in step["microbatches"]:
                    drawing = {**microbatch["draws"], **drawing}
        return drawing


@dataclass(frozen=True)
class SketchPair:
    """See the module. All are sketches of the same rows.

    Attributes:
        name: of the module or the weight.
        expected: of one process.
        disturbed: of one process, disturbed by rounding; one or more.
        views: of the ranks: of each rank, or of outputs of each place in a tensor group; one if
            they hold parts, which are added.
    """

    name: str
    expected: Tensor
    disturbed: tuple[Tensor, ...]
    views: tuple[Tensor, ...]

    @property
    def size(self) -> float:
        """The norm of what one process has."""
        return float(self.expected.norm())

    @property
    def distance(self) -> float:
        """The largest distance of a rank from one process."""
        return max(_distance(view, self.expected) for view in self.views)

    @property
    def noise(self) -> float:
        """The largest distance of a disturbed process from one process."""
        return max(_distance(each, self.expected) for each in self.disturbed)


def _distance(a: Tensor, b: Tensor) -> float:
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    return float((a - b).nan_to_num(0.0, 0.0, 0.0).norm())


def outputs(
    alone: EngineRecording, disturbed: Sequence[EngineRecording], ranks: EngineRecording, step: int
) -> tuple[list[SketchPair], dict[str, str]]:
    """Return pairs of a step's outputs in the order of execution, the loss last; and name -> why of
    those that cannot be compared.
    """
    one = _rows(alone.microbatches(step))
    others = [_rows(each.microbatches(step)) for each in disturbed]
    places = range(ranks.tensor_size)
    views = [_rows(ranks.microbatches(step, index)) for index in places]
    skipped = dict(_skipped(alone, step)) | dict(_skipped(ranks, step))
    parts = {
        name
        for index in places
        for each in ranks.microbatches(step, index)
        for name in each["parts"]
    }
    pairs = []
    for name, rows in one.items():
        theirs = [view.get(name, {}) for view in views]
        if name in skipped:
            continue
        if not all(theirs):
            skipped[name] = "the ranks do not call it"
            continue
        every_run = [*theirs, *(each.get(name, {}) for each in others)]
        if any(each.keys() != rows.keys() for each in every_run):
            skipped[name] = "its rows are not those of samples"
            continue
        if len({row.shape for row in [*rows.values(), *(theirs[0][key] for key in rows)]}) > 1:
            skipped[name] = "its shape is another one"
            continue
        every = tuple(_stacked(each, rows) for each in theirs)
        shown = (torch.stack(every).sum(0),) if name in parts else every
        noisy = tuple(_stacked(each[name], rows) for each in others)
        pairs.append(SketchPair(name, _stacked(rows, rows), noisy, shown))
    pairs.append(_losses(alone, disturbed, ranks, step))
    return pairs, skipped


def _joined(stages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a microbatch as all stages have seen it, the first stage first."""
    *earlier, last = stages
    if not earlier:
        return last
    joined = {**last, "parts": [name for each in stages for name in each["parts"]]}
    for kind in ("outputs", "draws", "skipped"):
        joined[kind] = {}
        for each in stages:
            joined[kind] = {**each[kind], **joined[kind]}
    # a stage skips what it has as a shape alone
    joined["skipped"] = {
        name: why for name, why in joined["skipped"].items() if name not in joined["outputs"]
    }
    return joined


def _rows(microbatches: Sequence[Mapping[str, Any]]) -> dict[str, dict[Key, Tensor]]:
    """Return name -> sample (or the microbatch's samples) -> row, in the order of execution."""
    named: dict[str, dict[Key, Tensor]] = {}
    seen: Counter[str] = Counter()
    for each in microbatches:
        keys = []
        for sample in each["samples"]:
            keys.append((sample, seen[sample]))
            seen[sample] += 1
        for name, sketch in each["outputs"].items():
            own = named.setdefault(name, {})
            if len(sketch) == len(keys):
                own.update(zip(keys, sketch, strict=True))
            else:
                own[tuple(keys)] = sketch.reshape(-1)
    return named


def _stacked(rows: Mapping[Key, Tensor], order: Mapping[Key, Any]) -> Tensor:
    return torch.stack([rows[key] for key in order])


def _skipped(recording: EngineRecording, step: int) -> Iterator[tuple[str, str]]:
    for index in range(recording.tensor_size):
        for each in recording.microbatches(step, index):
            yield from each["skipped"].items()


def _losses(
    alone: EngineRecording, disturbed: Sequence[EngineRecording], ranks: EngineRecording, step: int
) -> SketchPair:
    """Return the loss of each microbatch; their mean, if one process has other microbatches."""
    places = range(ranks.tensor_size)
    own = [each["samples"] for each in alone.microbatches(step)]
    same = own == [each["samples"] for each in ranks.microbatches(step)]

    def values(microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
        losses = torch.tensor([each["loss"] for each in microbatches], dtype=torch.float64)
        sizes = torch.tensor([each["size"] for each in microbatches], dtype=torch.float64)
        return losses.reshape(-1, 1) if same else (losses * sizes).sum().reshape(1, 1) / sizes.sum()

    return SketchPair(
        LOSS,
        values(alone.microbatches(step)),
        tuple(values(each.microbatches(step)) for each in disturbed),
        tuple(values(ranks.microbatches(step, index)) for index in places),
    )


def order_of(alone: EngineRecording) -> dict[str, int]:
    """Return the modules of one process -> their place in the order of execution."""
    names = alone.microbatches(0)[0]["outputs"]
    return {name: place for place, name in enumerate(names)}


def weights(
    alone: Sequence[Mapping[str, Any]],
    ranks: Sequence[Mapping[str, Any]],
    elsewhere: Sequence[Sequence[str]],
) -> tuple[list[SketchPair], dict[str, str]]:
    """Return pairs by name, and name -> why of those that cannot be compared.

    Args:
        alone: name -> sketch, of one process, then of the disturbed ones.
        ranks: the same of each rank.
        elsewhere: of each rank, the names that are on other pipeline stages.
    """
    pairs, skipped = [], {}
    first, *disturbed = alone
    for name, own in first.items():
        theirs = [
            rank.get(name, "the ranks do not have it")
            for rank, others in zip(ranks, elsewhere, strict=True)
            if name not in others
        ]
        texts = [each for each in [own, *theirs] if isinstance(each, str)]
        if texts:
            skipped[name] = texts[0]
            continue
        noisy = tuple(each[name] for each in disturbed)
        pairs.append(SketchPair(name, own, noisy, tuple(theirs)))
    return pairs, skipped


def backwards(pairs: Sequence[SketchPair], order: Mapping[str, int]) -> list[SketchPair]:
    """Return the pairs of gradients as backward computes them: the last module first."""

    def place(pair: SketchPair) -> int:
        return order.get(pair.name.rpartition(".")[0], -1)

    return sorted(pairs, key=place)[::-1]
