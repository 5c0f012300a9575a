"""Units: the parts of a Task that are called whole, in order, and the stages that hold them.

A unit is a block of a list of blocks, or a module with weights that holds no block (an embedding, a
norm, a head). A norm that tracks statistics is one without weights too, since one stage must track
them; other buffers, as tables of positions, are on all stages. Stages are runs of neighbouring
units; a stage begins with a block. They are cut so that the stage with the most work has as little
as possible: by the operations that a sample counts (work.py), or by weights if there is none to
count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainkit.engine.blocks import repeated_blocks
from trainkit.errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """A part of a Task.

    Attributes:
        name: of the module.
        stage: that holds it, from 0; of a rank with several, each is one.
    """

    name: str
    module: nn.Module
    stage: int


def units_of(
    task: nn.Module,
    ranks: int,
    work: Sequence[int] | None = None,
    chunks: int = 1,
) -> list[Unit]:
    """Return the units of a Task, each with its stage: those that the Task's `pipeline_stages()`
    names, else runs of about as much work.

    Args:
        ranks: engine.pipeline.
        chunks: stages of each.
        work: of each unit (`named_units`). Default: its weights, without embeddings, which compute
            nothing.

    Raises:
        ConfigError: there are fewer blocks than stages, or `pipeline_stages()` does not name each
            unit once.
    """
    stages = ranks * chunks
    given = f"engine.pipeline is {ranks}"
    if chunks > 1:
        given += f" and engine.pipeline_chunks is {chunks}: {stages} stages"
    blocks = set(repeated_blocks(task))
    parts = named_units(task)
    chosen = getattr(task, "pipeline_stages", None)
    if chosen is not None:
        return _named(task, parts, chosen(), stages, given)
    starts = [place for place, (_, module) in enumerate(parts) if module in blocks]
    if len(starts) < stages:
        raise ConfigError(
            f"{given}, and {type(task).__name__} has {len(starts)} blocks"
            " (several modules of one class in a list); each stage needs one. Choose fewer stages"
            f"{', or engine.pipeline_schedule=1f1b' if chunks > 1 else ''},"
            " or return the modules of each stage from the Task's pipeline_stages()."
        )
    if work is None:
        work = [work_of(module) for _, module in parts]
    firsts = [0, *_balanced(work, starts[1:], stages)]
    return [
        Unit(name, module, sum(first <= place for first in firsts) - 1)
        for place, (name, module) in enumerate(parts)
    ]


def named_units(task: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the units of a Task by name, in the order of registration."""
    return list(_parts(task, set(repeated_blocks(task))))


def _parts(
    module: nn.Module, blocks: set[nn.Module], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units inside a module by name, in the order of registration."""
    if module in blocks:
        yield name, module
        return
    if not any(child in blocks for child in module.modules()) and name:
        if any(True for _ in module.parameters()) or tracks_statistics(module):
            yield name, module
        return
    for own, child in module.named_children():
        yield from _parts(child, blocks, f"{name}.{own}" if name else own)


def tracks_statistics(module: nn.Module) -> bool:
    """Whether a norm inside a module tracks the mean and variance of what it has seen."""
    norms = (child for child in module.modules() if isinstance(child, _NormBase))
    return any(norm.running_mean is not None for norm in norms)


def work_of(module: nn.Module) -> int:
    """Return a module's weights but for embeddings: what a sample's forward multiplies with."""
    tables = {
        id(parameter)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag))
        for parameter in child.parameters(recurse=False)
    }
    return sum(p.numel() for p in module.parameters() if id(p) not in tables)


def _balanced(work: Sequence[int], starts: Sequence[int], stages: int) -> list[int]:
    """Return where the stages after the first begin, so that the largest one is as small as
    possible.

    Args:
        work: of each unit.
        starts: places at which a stage may begin.
    """
    sums = [0, *itertools.accumulate(work)]
    # begin of the rest, stages for it -> (the largest stage's work, where its later stages begin)
    best: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for first in [*reversed(starts), 0]:
        best[first, 1] = sums[-1] - sums[first], []
        for count in range(2, stages + 1):
            options = [
                (
                    max(sums[at] - sums[first], best[at, count - 1][0]),
                    at,
                )
                for at in starts
                if at > first and (at, count - 1) in best
            ]
            if options:
                largest, at = min(options)
                best[first, count] = (
                    largest,
                    [at, *best[at, count - 1][1]],
                )
    return best[0, stages][1]


def _named(
    task: nn.Module,
    parts: Sequence[tuple[str, nn.Module]],
    chosen: object,
    stages: int,
    given: str,
) -> list[Unit]:
    kind = type(task).__name__
    if not isinstance(chosen, Sequence) or len(chosen) != stages:
        count = len(chosen) if isinstance(chosen, Sequence) else chosen
        raise ConfigError(
            f"{given}, and {kind}.pipeline_stages() returned {count} stages. It"
            " must return a list with an entry for each stage, in order: its modules, or one that"
            " holds them."
        )
    homes: dict[nn.Module, int] = {}
    for stage, modules in enumerate(chosen):
        for module in [modules] if isinstance(modules, nn.Module) else modules:
            homes |= dict.fromkeys(module.modules(), stage)
    for name, module in parts:
        if module not in homes:
            has = "weights" if any(True for _ in module.parameters()) else "statistics"
            raise ConfigError(
                f"{kind}.pipeline_stages() leaves out '{name}', which has {has}. Add it to the"
                " modules of the stage that calls it."
            )
    return [Unit(name, module, homes[module]) for name, module in parts]
