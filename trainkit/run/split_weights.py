"""What cannot work if each rank holds a part of the weights (engine=fsdp);
refused before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from trainkit.engine.base import Engine
from trainkit.errors import ConfigError, TaskError
from trainkit.run.feature import Feature


def check_split(engine: Engine, task: nn.Module, features: Iterable[Feature]) -> None:
    """Refuse features that need whole weights on each rank, and layers whose gradients are not
    split.

    Raises:
        ConfigError: there is one.
    """
    if engine.splits_weights and (reason := next(_reasons(task, features), None)):
        raise ConfigError(
            f"engine is {engine.name}, and its ranks hold parts of the weights; {reason}"
        )


def check_split_optimizers(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse, or name, torch's optimizers that compute with whole matrices; trainkit.optim has
    them for parts. Refuse others that say why in `not_split`.

    Raises:
        TaskError: there is one that fails.
    """
    if not engine.splits_weights:
        return
    for optimizer in optimizers:
        if type(optimizer) is torch.optim.Adafactor:
            raise TaskError(
                f"The optimizer is torch.optim.Adafactor, and engine is {engine.name}: it fails on"
                " weights of which each rank holds a part. Use trainkit.optim.Adafactor, which"
                " gathers each for its update."
            )
        if reason := getattr(optimizer, "not_split", ""):
            raise TaskError(
                f"The optimizer is {type(optimizer).__name__}, and engine is {engine.name}, where each"
                f" rank holds a part of the weights: {reason}. Use engine=ddp or horovod, or another"
                " optimizer."
            )
        if type(optimizer) is torch.optim.Muon:
            engine.ranks.say(
                f"torch.optim.Muon with engine={engine.name} sums partial products in bfloat16: the"
                " update of a matrix with more rows than columns differs by some percent from that"
                " of one process. trainkit.optim.Muon(decay_groups(self)) makes the same one."
            )


def _reasons(task: nn.Module, features: Iterable[Feature]) -> Iterator[str]:
    yield from (feature.not_split for feature in features if feature.not_split)
    for name, module in task.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield (
                f"'{name}' has sparse gradients (sparse=True), which are not split. Use"
                " sparse=False, or engine=ddp."
            )
