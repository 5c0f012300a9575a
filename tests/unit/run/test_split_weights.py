"""What ranks that hold parts of the weights cannot do is refused before training,
with what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.helpers.toy import Line
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.halving.oom import HalveOnOom
from trainkit.extensions.sync_batchnorm.feature import SyncNorms
from trainkit.optim import SOAP, Adafactor, AdEMAMix, Muon, decay_groups
from trainkit.run.bad_samples import SkipBadSamples
from trainkit.run.elastic import ElasticFit, ElasticState
from trainkit.run.feature import Feature, Features
from trainkit.run.finite import StopOnNonfinite
from trainkit.run.manual import ManualUpdates
from trainkit.run.split_weights import check_split, check_split_optimizers


class Tables(Line):
    """A table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)


def check(features: Sequence[Feature] = (), task: Line | None = None, splits: bool = True) -> None:
    """Check a fit of a Task with these features."""
    engine: Any = SimpleNamespace(splits_weights=splits, name="fsdp")
    check_split(engine, task or Line(), features)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"features": [ElasticFit(ElasticState(print))]},
            r"the job is elastic: .*torchrun --max-restarts 3, with resume=auto",
        ),
        (
            {"features": [HalveOnOom()]},
            r"trainer\.halve_batch_on_oom is true: .*engine\.cpu_offload=true",
        ),
        (
            {"features": [StopOnNonfinite(), SkipBadSamples(3, print)]},
            r"on_bad_sample is 'skip': .*Leave it out",
        ),
        (
            {"features": [ManualUpdates(cast(Any, None), Features())]},
            r"automatic_optimization=False\)\. Use engine=ddp",
        ),
        ({"features": [SyncNorms(print)]}, r"trainer\.sync_batchnorm is true: .*GroupNorm"),
        ({"task": Tables()}, r"'table' has sparse gradients .*Use sparse=False"),
    ],
)
def test_what_needs_whole_weights_is_refused(given: dict[str, Any], words: str) -> None:
    """The message names the engine, the setting, the reason and what to use;
    engines of whole weights take it.
    """
    with pytest.raises(
        ConfigError, match=rf"engine is fsdp, and its ranks hold parts of the weights; .*{words}"
    ):
        check(**given)
    check(**given, splits=False)


def test_a_plain_fit_is_taken() -> None:
    """Nothing else is refused."""
    check([StopOnNonfinite()])


def said_of(make: Any, splits: bool = True) -> list[str]:
    """Return what is said of an optimizer."""
    said: list[str] = []
    ranks = SimpleNamespace(say=said.append)
    engine: Any = SimpleNamespace(splits_weights=splits, name="fsdp", ranks=ranks)
    check_split_optimizers(engine, [make(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))])
    return said


def torchs_muon(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's Muon of a model's matrices."""
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])


def test_torchs_adafactor_is_refused() -> None:
    """It would fail in its first step; the message names what works."""
    make = lambda model: torch.optim.Adafactor(model.parameters())  # noqa: E731
    with pytest.raises(TaskError, match=r"fails on weights .*Use trainkit\.optim\.Adafactor"):
        said_of(make)
    assert said_of(make, splits=False) == []


def test_an_optimizer_of_whole_matrices_is_refused() -> None:
    """SOAP decomposes them; the message says so, and where it works."""
    make = lambda model: SOAP(model.parameters())  # noqa: E731
    with pytest.raises(TaskError, match=r"is SOAP, .*decomposes whole .*Use engine=ddp or horovod"):
        said_of(make)
    assert said_of(make, splits=False) == []
    assert said_of(lambda model: AdEMAMix(model.parameters())) == []


def test_torchs_muon_is_named() -> None:
    """Its updates are not those of one process; trainkit's are, and nothing is said of these."""
    assert "trainkit.optim.Muon(decay_groups(self))" in said_of(torchs_muon)[0]
    assert said_of(torchs_muon, splits=False) == []
    assert said_of(lambda model: Muon(decay_groups(model))) == []
    assert said_of(lambda model: Adafactor(model.parameters())) == []


def test_an_elastic_job_of_replicas_is_not_refused() -> None:
    """Where other ranks have each part of a lost rank's weights, the job may be elastic."""
    check([ElasticFit(ElasticState(print), outlives_ranks=True)])
