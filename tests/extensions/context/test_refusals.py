"""What does not go with ranks that share the tokens of samples."""

from __future__ import annotations

import re

import pytest

from trainkit.engine.ranks import Ranks
from trainkit.engine.select import make_engine
from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError
from trainkit.extensions.context.ranks import ContextGroup
from trainkit.extensions.fsdp.engine import FSDPEngine
from trainkit.extensions.fsdp.layouts import check_groups
from trainkit.extensions.plan.show import _token_rows
from trainkit.launch.environment import Launcher


def ranks_at(rank: int, tensor: int = 2, context: int = 2) -> Ranks:
    """One of eight ranks."""
    made = Ranks(Launcher("torchrun", rank, 8, rank, 8))
    made.tensor_size, made.context_size = tensor, context
    return made


def test_stages_are_refused_beside_it() -> None:
    """With both settings; tensor ranks go with either."""
    with pytest.raises(ConfigError, match=r"engine.context is 2, and engine.pipeline is 4"):
        FSDPEngine(context=2, pipeline=4)
    assert FSDPEngine(context=2, tensor=2).ranks.model_size == 4


def test_compiled_modules_are_refused() -> None:
    """Before the model is made; without context ranks they are not."""
    settings = StepSettings(4, 1, None, "norm", "32-true", used=frozenset({"trainer.compile"}))
    with pytest.raises(ConfigError, match=r"engine.context is 2, and trainer.compile is set"):
        FSDPEngine(context=2).agree(settings)
    FSDPEngine(tensor=2).agree(settings)


def test_groups_that_do_not_come_out_even_are_refused() -> None:
    """With each setting, and their product."""
    check_groups(8, 2, 2, 1, 2)
    text = "engine.tensor is 2 and engine.context is 2, and there are 6 ranks; their product, 4,"
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_groups(6, 1, 2, 1, 2)


@pytest.mark.parametrize("name", ["single", "ddp", "horovod"])
def test_other_engines_lack_it(name: str) -> None:
    """They say where it is."""
    with pytest.raises(ConfigError, match=r"context.*where it has no effect.*engine=fsdp"):
        make_engine(name, context=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "data_rank", "place", "counts"),
    [(0, 0, 0, True), (1, 0, 0, False), (2, 0, 1, False), (3, 0, 1, False), (7, 1, 1, False)],
)
def test_a_context_group_is_one_data_rank(
    rank: int, data_rank: int, place: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of neighbours, tensor ranks of the same tokens first."""
    made = ranks_at(rank)
    assert (made.data_rank, made.data_size, made.counts_samples) == (data_rank, 2, counts)
    assert (made.groups, made.stage) == ("2 data x 2 context x 2 tensor", 0)
    monkeypatch.setattr("trainkit.extensions.context.ranks._group_of", lambda ranks, comm: None)
    assert ContextGroup(made, None).place == place  # type: ignore[arg-type]


def test_a_plan_says_what_a_rank_has() -> None:
    """One row, if tokens are shared."""
    assert _token_rows(1) == []
    ((title, text),) = _token_rows(4)
    assert title == "tokens of a rank"
    assert text.startswith("1/4 of each sample's, and of their activations")
