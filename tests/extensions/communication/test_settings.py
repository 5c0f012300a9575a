"""Settings of communication, and what they exclude;
on simulated ranks, with the messages that a user reads.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.third_party_optimizers import Lookahead
from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import EMA
from trainkit.engine.ddp.engine import DDPEngine
from trainkit.engine.horovod.engine import HorovodEngine
from trainkit.engine.step_settings import Exact, StepSettings, communication_of
from trainkit.errors import ConfigError
from trainkit.extensions.communication.checks import check_communication
from trainkit.extensions.communication.settings import DiLoCo, LocalSGD, PowerSGD
from trainkit.extensions.plan.simulated import SimulatedEngine

ANY = StepSettings(4, 1, None, "norm", "32-true")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PowerSGD(rank=0), "communication.rank is 0; it must be a whole number, 1 or more"),
        (lambda: LocalSGD(every_n_steps=0), "communication.every_n_steps is 0; it must be"),
        (lambda: DiLoCo(every_n_steps=0), "communication.every_n_steps is 0; it must be"),
        (
            lambda: DiLoCo(outer_lr=0.0),
            "communication.outer_lr is 0.0; it must be a number above 0",
        ),
        (
            lambda: DiLoCo(outer_momentum=1.0),
            "communication.outer_momentum is 1.0; it must be below 1",
        ),
        (lambda: DiLoCo(outer_momentum=-0.1), "communication.outer_momentum is -0.1; it must be"),
        (
            lambda: DiLoCo(every_n_steps=2, fragments=3),
            "communication.fragments is 3, but communication.every_n_steps is 2",
        ),
        (
            lambda: communication_of("dilocco"),
            "trainer.communication is 'dilocco'; it must be one of exact, powersgd",
        ),
        (lambda: communication_of(3), "trainer.communication is 3; it must be one of"),
    ],
)
def test_bad_values_are_refused(make: Any, message: str) -> None:
    """By key, value, and what is legal."""
    with pytest.raises(ConfigError, match="^" + message.replace(".", r"\.")):
        make()


def settings(**changes: Any) -> StepSettings:
    """Return settings of a fit with some of them changed."""
    return StepSettings(
        **({"batch_size": 4, "accumulate": 1, "clip_val": None, "clip_algorithm": "norm"} | changes)
    )


@pytest.mark.parametrize(
    ("chosen", "engine", "options", "changes", "message"),
    [
        ("powersgd", "fsdp", {}, {}, "engine is fsdp: its ranks hold parts"),
        ("diloco", "deepspeed", {}, {}, "engine is deepspeed: its ranks hold parts"),
        ("powersgd", "ddp", {"compression": "fp16"}, {}, "engine.compression is 'fp16'"),
        ("powersgd", "horovod", {"op": "adasum"}, {}, "engine.op is 'adasum', which is no sum"),
        (
            "powersgd",
            "ddp",
            {"gradient_predivide_factor": 2.0},
            {},
            "engine.gradient_predivide_factor is 2.0",
        ),
        ("powersgd", "horovod", {}, {"used": frozenset({"elastic"})}, "the job is elastic"),
        ("powersgd", "ddp", {}, {"precision": "16-mixed"}, "trainer.precision is '16-mixed'"),
        ("local_sgd", "ddp", {}, {"precision": "16-mixed"}, "trainer.precision is '16-mixed'"),
        ("local_sgd", "ddp", {"op": "sum"}, {}, "engine.op is 'sum'"),
        (
            "diloco",
            "ddp",
            {"compression": "bf16"},
            {},
            "engine.compression is 'bf16', which is about sums",
        ),
        (
            "diloco",
            "ddp",
            {},
            {"used": frozenset({"manual_optimization"})},
            "the Task updates its weights itself",
        ),
        (
            "powersgd",
            "ddp",
            {},
            {"used": frozenset({"trainer.halve_batch_on_oom"})},
            "trainer.halve_batch_on_oom is true",
        ),
        ("diloco", "ddp", {}, {"callbacks": {"equal_weights": "EMA"}}, "the callback EMA averages"),
    ],
)
def test_what_does_not_go_together_is_refused(
    chosen: str, engine: str, options: Any, changes: Any, message: str
) -> None:
    """Each with the kind of communication, the setting, and what to do;
    exact sums take them all.
    """
    given = settings(**({"precision": "32-true"} | changes))
    with pytest.raises(ConfigError) as error:
        check_communication(communication_of(chosen), engine, options, given)
    assert str(error.value).startswith(f"communication is '{chosen}', and {message}")
    assert any(word in str(error.value) for word in ("Use ", "use ", "Leave "))
    here: Any = SimpleNamespace(ranks=None)
    assert Exact().begin(given, engine, options, here).shown == ""


@pytest.mark.parametrize("make", [DDPEngine, HorovodEngine])
def test_buckets_of_sums_that_are_never_taken_are_refused(make: Any) -> None:
    """Ranks that step alone sum no gradients: how sums are put together would have no effect."""
    option = "bucket_cap_mb" if make is DDPEngine else "num_groups"
    with pytest.raises(
        ConfigError, match=f"engine.{option} is 3, which is about sums of gradients"
    ):
        make("cpu", **{option: 3}).agree(settings(precision="32-true", communication=DiLoCo()))
    make("cpu", **{option: 3}).agree(settings(precision="32-true"))


def test_other_settings_pass() -> None:
    """Exact steps first sum gradients, so options of sums go with them;
    so does an elastic job with ranks alone.
    """
    check_communication(LocalSGD(start_after_steps=3), "ddp", {"compression": "fp16"}, ANY)
    check_communication(
        DiLoCo(), "horovod", {}, settings(precision="bf16-mixed", used=frozenset({"elastic"}))
    )
    check_communication(PowerSGD(), "horovod", {"op": "sum"}, ANY)


def fit(folder: Path, task: Any, communication: Any, **more: Any) -> Any:
    """Fit as rank 0 of two simulated ranks."""
    trainer = quiet(
        folder,
        engine=SimulatedEngine("ddp", 2, 2),
        communication=communication,
        max_steps=1,
        **more,
    )
    trainer.fit(task, loader(8))
    return trainer


def test_a_rank_at_which_nothing_shrinks_is_refused(tmp_path: Path) -> None:
    """A rank larger than the matrices; nothing has been trained."""
    task = Line()
    before = task.model.weight.detach().clone()
    with pytest.raises(
        ConfigError,
        match=r"communication.rank is 64, and none of the Task's 2 trained parameters is a matrix",
    ):
        fit(tmp_path, task, PowerSGD(rank=64))
    assert torch.equal(task.model.weight, before)


def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    """They travel as rows."""

    class Words(Line):
        def make_model(self) -> nn.Module:
            return nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 4))

    with pytest.raises(ConfigError, match=r"'model.0.weight' has sparse gradients"):
        fit(tmp_path, Words(), PowerSGD(min_compression=0.0))


def test_more_fragments_than_parameters_are_refused(tmp_path: Path) -> None:
    """A fragment has one parameter at least."""
    with pytest.raises(
        ConfigError, match=r"communication.fragments is 3, but the Task has 2 trained parameters"
    ):
        fit(tmp_path, Line(), DiLoCo(every_n_steps=4, fragments=3))


def test_averages_of_weights_are_refused(tmp_path: Path) -> None:
    """By the class of the user's callback."""
    with pytest.raises(ConfigError, match="the callback EMA averages or compares the weights"):
        fit(tmp_path, Line(), "diloco", callbacks=[EMA()])


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_a_rank_is_at_most_the_shorter_side(rank: int) -> None:
    """Vectors travel exactly, and so does a matrix that would not shrink."""
    chosen = PowerSGD(rank=rank, min_compression=0.0)
    assert chosen.rank_for((4, 3, 2)) == min(rank, 4)
    assert chosen.rank_for((7,)) == 0
    assert chosen.rank_for(()) == 0
    assert PowerSGD(rank=rank).rank_for((100, 100)) == rank
    assert PowerSGD(rank=40).rank_for((100, 100)) == 0


@pytest.mark.parametrize(
    ("name", "words"), [("powersgd", "exact: with one rank"), ("local_sgd", "exact: with one rank")]
)
def test_one_rank_is_exact(name: str, words: str, tmp_path: Path, capsys: Any) -> None:
    """Nothing changes, bit for bit, and the banner says so."""
    ends = []
    for communication in ("exact", name):
        task = Line(momentum=0.9)
        quiet(
            tmp_path / communication,
            communication=communication,
            max_epochs=2,
            enable_model_summary=True,
        ).fit(task, loader())
        ends.append(task.model.weight.detach().clone())
    assert torch.equal(*ends)
    assert words in capsys.readouterr().out


def test_one_rank_takes_outer_steps(tmp_path: Path, capsys: Any) -> None:
    """DiLoCo means something at one rank: 2 steps of rate 0.1, then half of the change, by hand."""
    task, plain = Line(), Line()
    trainer = quiet(
        tmp_path,
        communication=DiLoCo(2, 0.5, 0.0),
        max_steps=2,
        num_sanity_val_steps=0,
        enable_model_summary=True,
    )
    trainer.fit(task, loader(8))
    start = plain.model.weight.detach().clone()
    quiet(tmp_path / "plain", max_steps=2).fit(plain, loader(8))
    torch.testing.assert_close(task.model.weight, start + 0.5 * (plain.model.weight - start))
    assert "gradients" in (text := capsys.readouterr().out)
    assert (
        "approximate: an outer step of rate 0.5 and momentum 0 each 2 steps that ranks take alone"
        " (DiLoCo)" in text
    )


def test_the_contract_compares_it(tmp_path: Path, capsys: Any) -> None:
    """A run that resumes with another communication says so, and what it leaves."""
    for communication, steps, path in ((DiLoCo(3), 4, None), ("exact", 6, "last")):
        trainer = quiet(
            tmp_path, communication=communication, max_steps=steps, enable_checkpointing=True
        )
        trainer.fit(Line(), loader(), ckpt_path=path)
    text = capsys.readouterr().out
    assert (
        "communication was an outer step of rate 0.7 and momentum 0.9 each 3 steps that ranks take"
        " alone (DiLoCo), is exact" in text
    )
    assert "the state of another communication" in text


def test_an_optimizer_whose_state_has_a_form_of_its_own_is_refused(tmp_path: Path) -> None:
    """At the start, and not at the first checkpoint: each rank saves its own part."""
    task = Line()
    optimizer = Lookahead(torch.optim.SGD(task.parameters(), lr=0.05), own_form=True)
    task.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"communication is rounds.* of Lookahead has a form of"):
        fit(tmp_path, task, LocalSGD(every_n_steps=2))
