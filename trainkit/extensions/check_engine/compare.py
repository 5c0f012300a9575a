"""The comparison of ranks with one process, stage by stage in the order of training.

compare      all stages
StageResult  of one: outputs, gradients, weights or buffers of a step
Difference   what differs first
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.console import plural
from trainkit.errors import ConfigError
from trainkit.extensions.check_engine.causes import Context, causes_of
from trainkit.extensions.check_engine.recording import (
    EngineRecording,
    SketchPair,
    backwards,
    order_of,
    outputs,
    weights,
)

_OF_WEIGHTS = 2.0**-23
_FACTOR = 10  # of what rounding does to the disturbed processes
_OF_A_KINK = 0.1  # relative; differences below may be one
_CHAOS = 0.03  # relative; a rounding error that grew to this leaves nothing to compare


@dataclass(frozen=True)
class Difference:
    """What differs first.

    Attributes:
        stage: where.
        name: of the module, weight or buffer.
        relative: its distance from one process, relative to its size.
        allowed: what rounding explains.
        causes: likely ones, the likeliest first.
    """

    stage: str
    name: str
    relative: float
    allowed: float
    causes: tuple[str, ...]


@dataclass(frozen=True)
class StageResult:
    """The result of a stage.

    Attributes:
        what: "step 1 outputs".
        unit: what is counted.
        compared: how many were.
        skipped: name -> why the others were not.
        largest: difference, relative, beside what is allowed for it.
        differing: how many differ.
        first: the first of them.
        is_noted: whether its differences are reported and do not decide (batch norm's statistics).
        hidden: the relative difference that rounding hides in the median of them.
    """

    what: str
    unit: str
    compared: int
    skipped: Mapping[str, str] = field(default_factory=dict)
    largest: tuple[float, float] = (0.0, 0.0)
    differing: int = 0
    first: Difference | None = None
    is_noted: bool = False
    hidden: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """All of them.

    Attributes:
        stages: in the order of training, up to the step of the first difference.
        steps: that were recorded.
        dropout: modules, or functions, that would have drawn masks.
        draws: modules that draw other random numbers -> the function.
    """

    stages: tuple[StageResult, ...]
    steps: int
    dropout: tuple[str, ...] = ()
    draws: Mapping[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Difference | None:
        """What differs first; None: nothing does."""
        return next((each.first for each in self.stages if each.first and not each.is_noted), None)

    @property
    def is_doubtful(self) -> bool:
        """Whether rounding may have done it after all: at a kink (ReLU, a maximum) one sample's
        share of a gradient comes or goes.
        """
        return self.first is not None and self.first.relative < _OF_A_KINK

    @property
    def notes(self) -> list[Difference]:
        """Differences that do not decide."""
        return [each.first for each in self.stages if each.first and each.is_noted][:1]


def compare(
    alone: EngineRecording,
    disturbed: Sequence[EngineRecording],
    ranks: EngineRecording,
    error: float,
) -> Comparison:
    """Compare the records of a job with those of one process.

    Args:
        alone: of one process.
        disturbed: of one process with a rounding error; one or more.
        ranks: of the job.
        error: the size of the rounding error.

    Raises:
        ConfigError: it cannot be compared; the message has the reason.
    """
    steps = min(alone.steps, ranks.steps, *(each.steps for each in disturbed))
    if not steps:
        raise ConfigError(
            "No step was recorded: the training data are fewer than one step needs. Lower the batch"
            " size."
        )
    judge = _Judge(alone, disturbed, ranks, error)
    stages = [*judge.structure(), judge.start()]
    for step in range(steps):
        if any(stage.first and not stage.is_noted for stage in stages):
            break
        _check_samples(alone, ranks, step)
        stages += judge.step(step)
    dropout = [*alone.first["dropout"]]
    dropout += ["functions of torch"] * bool(alone.first.get("functional_dropout"))
    return Comparison(tuple(stages), steps, tuple(dropout), ranks.draws())


def _check_samples(alone: EngineRecording, ranks: EngineRecording, step: int) -> None:
    ours, theirs = alone.samples(step), ranks.samples(step)
    for place in range(1, ranks.model_size):
        group = [key for each in ranks.of_place(step, place) for key in each["samples"]]
        if group != theirs:
            raise ConfigError(
                f"The samples of step {step + 1} differ between the ranks of a model"
                " (engine.tensor, .pipeline, .context), which must read the same. It cannot be compared"
                " with one process."
            )
    if sorted(ours) != sorted(theirs):
        common = len(set(ours) & set(theirs))
        raise ConfigError(
            f"The samples of step {step + 1} are not those of one process: {len(ours)} there,"
            f" {len(theirs)} on the ranks, {common} of them equal. Data that each rank reads by"
            " itself, batches made by your own sampler, and augmentation that draws without a seed"
            " cannot be compared. Use a map-style data set in a DataLoader, and leave augmentation"
            " out."
        )


@dataclass(frozen=True)
class _Judge:
    alone: EngineRecording
    disturbed: Sequence[EngineRecording]
    ranks: EngineRecording
    error: float

    def structure(self) -> list[StageResult]:
        """Compare which weights there are, and which of them are one."""
        ours, theirs = self.alone.first, self.ranks.first
        there = {name for rank in self.ranks.ranks for name in rank["start"]}
        missing = sorted(set(ours["start"]) ^ there)
        parted = [own for own in ours["tied"] if own not in theirs["tied"]]
        if not missing and not parted:
            return []
        if parted:
            name = parted[0][-1]
            cause = (
                f"an untied weight: {' and '.join(parted[0])} are one weight in one process, and"
                " train apart on the ranks. Tie them again after the model is moved or split"
            )
        else:
            name = missing[0]
            has = "one process" if name in ours["start"] else "the ranks"
            cause = f"only {has} has this weight: the model is made otherwise on ranks"
        first = Difference("weights before step 1", name, float("inf"), 0.0, (cause,))
        return [
            StageResult("weights' names", "weights", len(ours["start"]), first=first, differing=1)
        ]

    def start(self) -> StageResult:
        """Compare the weights before the first step."""
        alone = [each.first["start"] for each in [self.alone, *self.disturbed]]
        pairs, skipped = weights(
            alone, [rank["start"] for rank in self.ranks.ranks], self.ranks.elsewhere
        )
        if unlike := [pair.name for pair in pairs if pair.noise > 0]:
            raise ConfigError(
                f"Two runs of one process begin with other weights, first in {unlike[0]}: they are"
                " drawn without a seed. Call trainkit.seed_everything(0) before the model is made."
            )
        return self._stage("weights before step 1", "weights", pairs, skipped, "start")

    def step(self, step: int) -> list[StageResult]:
        """Compare a step, stage by stage."""
        name = f"step {step + 1}"
        pairs, skipped = outputs(self.alone, self.disturbed, self.ranks, step)
        stages = [self._stage(f"{name} outputs", "outputs", pairs, skipped, "outputs")]
        if step == 0:
            self._refuse_chaos(pairs)
        order = order_of(self.alone)
        for kind, what, unit in (
            ("gradients", "gradients", "weights"),
            ("used", "clipped gradients", "weights"),
            ("weights", "weights", "weights"),
            ("buffers", "buffers", "buffers"),
        ):
            pairs, skipped = self._weights(step, kind)
            if not pairs and not skipped:
                continue
            if kind in ("gradients", "used"):
                pairs = backwards(pairs, order)
            normal, noted = self._parted(pairs) if kind == "buffers" else (pairs, [])
            if normal or not noted:
                stages.append(self._stage(f"{name} {what}", unit, normal, skipped, kind))
            if noted:
                stages.append(
                    self._stage(f"{name} batch statistics", unit, noted, {}, kind, is_noted=True)
                )
        return stages

    def _weights(self, step: int, kind: str) -> tuple[list[SketchPair], dict[str, str]]:
        alone = [each.first["steps"][step][kind] for each in [self.alone, *self.disturbed]]
        ranks = [rank["steps"][step][kind] for rank in self.ranks.ranks]
        return weights(alone, ranks, self.ranks.elsewhere)

    def _parted(self, pairs: Sequence[SketchPair]) -> tuple[list[SketchPair], list[SketchPair]]:
        """Part the statistics of batch norm, which are a rank's own unless
        trainer.sync_batchnorm, from other buffers.
        """
        modules = self.alone.first["modules"]

        def is_statistics(pair: SketchPair) -> bool:
            kind: str = modules.get(pair.name.rpartition(".")[0], "")
            return kind.endswith(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"))

        return (
            [pair for pair in pairs if not is_statistics(pair)],
            [pair for pair in pairs if is_statistics(pair)],
        )

    def _refuse_chaos(self, pairs: Sequence[SketchPair]) -> None:
        noise = _level(pairs)
        if noise > max(_CHAOS, 30 * self.error):
            drawing = [name or "training_step" for name in self.alone.draws()]
            random = ", ".join(drawing) or "none that torch draws"
            raise ConfigError(
                f"Two runs of one process that begin {self.error:.0e} apart are {noise:.1g} apart"
                " after one forward: nothing could be compared. Modules that draw random numbers:"
                f" {random}."
            )

    def _stage(
        self,
        what: str,
        unit: str,
        pairs: Sequence[SketchPair],
        skipped: Mapping[str, str],
        kind: str,
        is_noted: bool = False,
    ) -> StageResult:
        # weights are not computed before the first step: they are equal, in any precision
        error = min(self.error, _OF_WEIGHTS) if kind == "start" else self.error
        bounds = _bounds(pairs, error)
        differing = [
            (pair, bound)
            for pair, bound in zip(pairs, bounds, strict=True)
            if pair.distance > bound
        ]
        shares = [
            (_share(pair.distance, pair), _share(bound, pair))
            for pair, bound in zip(pairs, bounds, strict=True)
        ]
        first = None
        if differing:
            pair, bound = differing[0]
            context = Context(self.alone, self.ranks, kind, pairs)
            first = Difference(
                what,
                pair.name,
                _share(pair.distance, pair),
                _share(bound, pair),
                causes_of(pair, context),
            )
        worst = max(shares, key=lambda own: own[0] / own[1] if own[1] else own[0], default=(0, 0))
        hidden = _FACTOR * _level(pairs)
        count = len(differing)
        return StageResult(
            what,
            unit,
            len(pairs),
            skipped,
            worst,
            count,
            first,
            is_noted,
            hidden,
        )


def _bounds(pairs: Sequence[SketchPair], error: float) -> list[float]:
    """Return the distance that rounding explains, for each pair.

    A multiple of what it does to the disturbed processes: to this tensor, or to the median one,
    as a few numbers may by chance agree; more of it for tensors of a few numbers.
    """
    level = _level(pairs)
    typical = statistics.median(
        [pair.size / pair.expected.numel() ** 0.5 for pair in pairs] or [0.0]
    )
    bounds = []
    for pair in pairs:
        count = pair.expected.numel()
        own = max(pair.noise, level * pair.size, 4 * error * pair.size)
        floor = 4 * error * typical * count**0.5
        bounds.append(_FACTOR * own * (1 + 3 / count**0.5) + floor)
    return bounds


def _share(distance: float, pair: SketchPair) -> float:
    return distance / pair.size if pair.size else distance


def _level(pairs: Sequence[SketchPair]) -> float:
    shares = [pair.noise / pair.size for pair in pairs if pair.size]
    return statistics.median(shares or [0.0])


def skipped_text(skipped: Mapping[str, str]) -> str:
    """Return a note on what was not compared; "" for none."""
    if not skipped:
        return ""
    name, why = next(iter(skipped.items()))
    return f"{plural(len(skipped), 'other')} skipped: {name} ({why})"


def facts_of(comparison: Comparison) -> dict[str, Any]:
    """Return what --json prints of it."""
    first = comparison.first
    return {
        "equal": first is None,
        "first_difference": None
        if first is None
        else {
            "stage": first.stage,
            "name": first.name,
            "relative": first.relative,
            "allowed": first.allowed,
            "causes": list(first.causes),
        },
        "stages": [
            {
                "what": stage.what,
                "compared": stage.compared,
                "skipped": dict(stage.skipped),
                "largest": stage.largest[0],
                "allowed": stage.largest[1],
                "differing": stage.differing,
                "first": stage.first and stage.first.name,
            }
            for stage in comparison.stages
        ],
        "dropout_off": list(comparison.dropout),
        "draws": dict(comparison.draws),
    }
