"""What ranks that hold parts of the weights cannot do is refused before training, with what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.helpers.toy import Line
from trainkit.errors import ConfigError
from trainkit.run.split_weights import check_split


class Tables(Line):
    """A table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)


class ByHand(Line):
    """Updates its weights itself."""

    automatic_optimization = False


def stage(task: Any = None, splits: bool = True, elastic: bool = False, limit: int | None = None, **numerics: bool) -> Any:
    """What check_split reads of a stage."""
    given = {"halve_batch_on_oom": False, "sync_batchnorm": False} | numerics
    options = SimpleNamespace(numerics=SimpleNamespace(**given), samples=SimpleNamespace(limit=limit))
    engine = SimpleNamespace(splits_weights=splits, name="fsdp")
    return SimpleNamespace(engine=engine, options=options, task=task or Line(), is_elastic=elastic)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"elastic": True}, r"the job is elastic: .*torchrun --max-restarts 3, with resume=auto"),
        ({"halve_batch_on_oom": True}, r"trainer\.halve_batch_on_oom is true: .*engine\.cpu_offload=true"),
        ({"limit": 3}, r"on_bad_sample is 'skip': .*Leave it out"),
        ({"task": ByHand()}, r"automatic_optimization=False\)\. Use engine=ddp"),
        ({"sync_batchnorm": True}, r"trainer\.sync_batchnorm is true: .*GroupNorm"),
        ({"task": Tables()}, r"'table' has sparse gradients .*Use sparse=False"),
    ],
)
def test_what_needs_whole_weights_is_refused(given: dict[str, Any], words: str) -> None:
    """The message names the engine, the setting, the reason and what to use; engines of whole weights take it."""
    with pytest.raises(ConfigError, match=rf"engine is fsdp, and its ranks hold parts of the weights; .*{words}"):
        check_split(stage(**given))
    check_split(stage(**given, splits=False))


def test_a_plain_fit_is_taken() -> None:
    """Nothing else is refused."""
    check_split(stage())
