"""Likely causes of a difference, from its numbers: which sum, factor, order or share of the ranks'
numbers gives that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.console import plural
from trainkit.extensions.check_engine.recording import EngineRecording, SketchPair

_CLOSE = 0.01  # relative: an explanation leaves no more than this
_UNLIKE = 0.02  # a factor differs from 1 by more


@dataclass(frozen=True)
class Context:
    """Where a difference was seen.

    Attributes:
        alone: the record of one process.
        ranks: of the job.
        kind: "start", "outputs", "gradients", "used", "weights" or "buffers".
        pairs: all of the stage.
    """

    alone: EngineRecording
    ranks: EngineRecording
    kind: str
    pairs: Sequence[SketchPair]

    @property
    def data_size(self) -> int:
        """Ranks that read different samples."""
        return int(self.ranks.first["data_size"])


def causes_of(pair: SketchPair, context: Context) -> tuple[str, ...]:
    """Return the likely causes, the likeliest first; at least one."""
    causes = [
        each
        for each in (
            _clipping(context),
            _missing(pair, context),
            _factor(pair, context),
            _sums(pair, context),
            _order(pair),
            _mask(pair, context),
            _statistics(pair, context),
            _random(pair, context),
            _apart(pair, context),
        )
        if each
    ]
    return tuple(causes or [_by_stage(pair, context)])


def _near(a: Tensor, b: Tensor) -> bool:
    size = float(b.norm())
    return size > 0 and float((a - b).norm()) <= _CLOSE * size


def _ratio(view: Tensor, expected: Tensor) -> float | None:
    """Return the factor between two tensors; None if there is no single one."""
    square = float((expected * expected).sum())
    if not square:
        return None
    factor = float((view * expected).sum()) / square
    return factor if factor and _near(view / factor, expected) else None


def _common_ratio(pair: SketchPair) -> float | None:
    ratios = [_ratio(view, pair.expected) for view in pair.views]
    first = ratios[0]
    if first is None or any(r is None or abs(r / first - 1) > _CLOSE for r in ratios):
        return None
    return first if abs(first - 1) > _UNLIKE else None


def _clipping(context: Context) -> str:
    if context.kind != "used":
        return ""
    return (
        "it was equal before it was clipped: a rank clips by another norm, as that of its own part"
        " or of its own gradients; the norm must be summed over ranks"
    )


def _missing(pair: SketchPair, context: Context) -> str:
    if not pair.size or any(float(view.norm()) for view in pair.views):
        return ""
    if context.kind == "outputs":
        return "it is 0 on the ranks: a part of the computation is left out"
    if context.kind in ("gradients", "used"):
        return (
            "no gradient arrives on the ranks: the weight is not used there, detached, or its"
            " gradient is cleared before the sum"
        )
    return "it is 0 on the ranks: it was not filled"


def _factor(pair: SketchPair, context: Context) -> str:
    ratio = _common_ratio(pair)
    if ratio is None:
        return ""
    world = len(context.ranks.ranks)
    data = context.data_size
    sizes = {
        world: "the number of ranks",
        context.ranks.tensor_size: f"the {context.ranks.group} ranks",
    }
    sizes[data] = "the data ranks" if data != world else "the number of ranks"
    times = f"it is {ratio:.4g} times that of one process on every rank"
    whole = next((n for n in sizes if n > 1 and abs(ratio / n - 1) < _UNLIKE), None)
    part = next((n for n in sizes if n > 1 and abs(ratio * n - 1) < _UNLIKE), None)
    others = [_common_ratio(each) for each in context.pairs if each.size]
    same = [r for r in others if r is not None and abs(r / ratio - 1) < _UNLIKE]
    all_of_it = ", as all others of this stage are" if len(same) == len(others) > 1 else ""
    if whole:
        return (
            f"{times}{all_of_it}, {sizes[whole]}: a sum over ranks where a mean belongs, a loss"
            " multiplied by the ranks, or a divisor that is missing"
        )
    if part:
        return (
            f"{times}{all_of_it}, 1 / {sizes[part]}: a mean over ranks where a sum belongs, or a"
            " division by the ranks or by the accumulation too many"
        )
    if context.kind == "gradients":
        return f"{times}{all_of_it}: a wrong divisor for accumulation, or a factor of the loss"
    return f"{times}{all_of_it}"


def _sums(pair: SketchPair, context: Context) -> str:
    views = pair.views
    if len(views) < 2 or _agree(views):
        return ""
    tensor, name = context.ranks.tensor_size, context.ranks.group
    groups = [("ranks", torch.stack(views))]
    if 1 < tensor < len(views):
        groups.append((f"the ranks of a {name} group", torch.stack(views[:tensor])))
        groups.append(("the data ranks", torch.stack(views[::tensor])))
    elif tensor > 1:
        groups = [(f"the ranks of a {name} group", torch.stack(views))]
    for who, values in groups:
        if _near(values.sum(0), pair.expected):
            return f"the sum over {who} is that of one process: {_missing_sum(context)}"
        if _near(values.mean(0), pair.expected):
            return (
                f"the mean over {who} is that of one process: each rank has its own, and a mean"
                " over ranks is missing"
            )
    return ""


def _missing_sum(context: Context) -> str:
    if context.ranks.group == "context":
        return (
            "sum_of_parts is missing, or a sum over tokens is that of a rank's own; see"
            " trainkit.extensions.context.sequence"
        )
    if context.kind == "outputs":
        return "a sum (all-reduce) is missing in forward, as after a layer that is split by rows"
    if context.ranks.tensor_size == 1:
        return "its gradient is not summed (all-reduced) over ranks"
    return (
        "its gradient is not summed (all-reduced) over the tensor group: of a layer that each rank"
        " applies to its part of a sequence, or before a layer that is split by columns"
    )


def _order(pair: SketchPair) -> str:
    expected = pair.expected.reshape(-1).sort().values
    for view in pair.views:
        if not _near(view, pair.expected) and _near(view.reshape(-1).sort().values, expected):
            return (
                "it has the same numbers in another order: a wrong offset of a rank's part, or"
                " parts that are put together in another order"
            )
    return ""


def _mask(pair: SketchPair, context: Context) -> str:
    if context.kind != "outputs":
        return ""
    masks = [view != 0 for view in pair.views]
    own = pair.expected != 0
    shares = [float((mask ^ own).double().mean()) for mask in masks]
    # some are 0 on one side alone, and the others agree, but for a factor
    if not 0.01 < max(shares) < 0.9:
        return ""
    for view, mask in zip(pair.views, masks, strict=True):
        both = mask & own
        if bool(both.any()) and _ratio(view[both], pair.expected[both]) is None:
            return ""
    unlike = len(masks) > 1 and any(not torch.equal(masks[0], mask) for mask in masks[1:])
    who = "the ranks of a tensor group have different ones" if unlike else "it differs by rank"
    return f"a mask (dropout?): other elements are 0 than in one process; {who}"


def _statistics(pair: SketchPair, context: Context) -> str:
    modules = context.alone.first["modules"]
    kind: str = modules.get(pair.name, modules.get(pair.name.rpartition(".")[0], ""))
    if context.kind == "buffers":
        return (
            "a buffer per rank: each has the statistics of its own samples; evaluation and"
            " checkpoints use rank 0's. trainer.sync_batchnorm=true takes those of all ranks"
            if "Norm" in kind
            else "a buffer per rank: it is updated from a rank's own samples, and not summed over"
            " ranks; checkpoints have rank 0's"
        )
    if context.kind == "outputs" and "Norm" in kind and "Layer" not in kind and "RMS" not in kind:
        return (
            f"{kind} takes statistics of a rank's own samples, where one process takes those of"
            " all: sum them over ranks (torch.nn.BatchNorm* with trainer.sync_batchnorm=true)"
        )
    return ""


def _random(pair: SketchPair, context: Context) -> str:
    draws = context.ranks.draws()
    # inside of the module, or of one that contains it
    inside = [name for name in draws if f"{name}.".startswith(f"{pair.name}.")]
    inside += [name for name in draws if not name or pair.name.startswith(f"{name}.")]
    if context.kind != "outputs" or not inside:
        return ""
    return (
        f"{inside[0] or 'training_step'} draws random numbers ({draws[inside[0]]}), other ones on each rank: draw them"
        " from a generator with the same seed, or by sample"
    )


def _agree(views: Sequence[Tensor]) -> bool:
    return all(_near(view, views[0]) or torch.equal(view, views[0]) for view in views[1:])


def _apart(pair: SketchPair, context: Context) -> str:
    """Say which ranks differ, if only some do."""
    if len(pair.views) < 2 or _agree(pair.views):
        return ""
    wrong = [i for i, view in enumerate(pair.views) if not _near(view, pair.expected)]
    if not 0 < len(wrong) < len(pair.views):
        return ""
    numbers = ", ".join(map(str, wrong))
    who = f"rank{'s' * (len(wrong) > 1)} {numbers}"
    if context.kind == "start":
        return (
            f"{who} alone: a broadcast of rank 0's weights is skipped, or the weight is filled by"
            " each rank after it"
        )
    return f"{who} alone"


def _by_stage(pair: SketchPair, context: Context) -> str:
    if context.kind == "start":
        return (
            "the weights are made otherwise on ranks: drawn per rank, or put together in another"
            " way from parts"
        )
    if context.kind == "weights":
        owned = pair.name in context.ranks.first["optimized"]
        if owned != (pair.name in context.alone.first["optimized"]):
            return (
                "no optimizer updates it on the ranks" if not owned else "only the ranks update it"
            )
        return (
            "its gradient is equal, and the update is not: optimizer state, rate or weight decay of"
            " a rank's own, or a weight that is written outside of the optimizer"
        )
    if context.kind == "gradients":
        return (
            "its outputs are equal in forward: the backward of this layer, or of the one after it,"
            f" lacks a sum over {plural(len(context.ranks.ranks), 'rank')}, or a part of the loss"
        )
    if context.kind == "outputs":
        return "its inputs are equal: the layer itself computes otherwise on ranks"
    return "it is a rank's own"
