"""What cannot work if each rank holds a part of the weights (engine=fsdp);
refused before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
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


def _reasons(task: nn.Module, features: Iterable[Feature]) -> Iterator[str]:
    yield from (feature.not_split for feature in features if feature.not_split)
    for name, module in task.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield (
                f"'{name}' has sparse gradients (sparse=True), which are not split. Use"
                " sparse=False, or engine=ddp."
            )
