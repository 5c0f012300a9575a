"""Schedulers that the user's own loop steps, as a plain script does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from tests.extensions.by_hand.test_loop import loop_of, make
from tests.helpers.threads import World
from tests.helpers.toy import loader, weights
from trainkit.callbacks import ModelCheckpoint
from trainkit.extensions.by_hand.schedulers import schedulers_of

Make = Callable[[Any], Any]
ROWS, BATCH = 24, 4

BY_STEP: dict[str, Make] = {
    "from zero": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / 8)
    ),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=13),
    "in a sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4),
            lr_scheduler.CosineAnnealingLR(optimizer, 9),
        ],
        [4],
    ),
}


def plain(make_scheduler: Make, lr: float = 0.1) -> tuple[Any, list[float]]:
    """Train as a script without any trainer does; return the weights and the rates."""
    model, optimizer = make()
    for group in optimizer.param_groups:
        group["lr"] = lr
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(2):
        for x, y in loader(ROWS):
            functional.mse_loss(model(x), y).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return weights(model), rates


def in_a_loop(
    folder: Path, make_scheduler: Make, stop_at: int = -1, **settings: Any
) -> tuple[Any, list[float]]:
    """Train in a Loop, the scheduler stepped after backward, where `optimizer.step()` was."""
    model, optimizer = make()
    scheduler, rates = make_scheduler(optimizer), []
    loop = loop_of(model, optimizer, loader(ROWS), run_dir=folder, **{"max_epochs": 2} | settings)
    with loop:
        for _ in loop.epochs():
            for x, y in loop.batches():
                rates.append(optimizer.param_groups[0]["lr"])
                loop.backward(functional.mse_loss(model(x), y))
                scheduler.step()
                if loop.global_step == stop_at:
                    loop.stop()
    return weights(model), rates


@pytest.mark.parametrize("name", BY_STEP)
def test_the_rates_and_the_weights_are_the_plain_loops(name: str, tmp_path: Path) -> None:
    """A warm-up from 0, a rate that is multiplied, a cycle of rate and momentum, a sequence."""
    expected, rates = plain(BY_STEP[name])
    trained, used = in_a_loop(tmp_path, BY_STEP[name])
    assert used == rates
    # float32, by torch's fused implementation
    assert torch.allclose(trained, expected, rtol=0, atol=1e-6)


def test_a_scheduler_of_epochs_holds(tmp_path: Path) -> None:
    """StepLR, stepped by the user after each epoch, holds for the whole next one."""
    model, optimizer = make()
    scheduler, rates = lr_scheduler.StepLR(optimizer, 1, 0.5), []
    with loop_of(model, optimizer, loader(ROWS), run_dir=tmp_path, max_epochs=3) as loop:
        for _ in loop.epochs():
            for x, y in loop.batches():
                rates.append(optimizer.param_groups[0]["lr"])
                loop.backward(functional.mse_loss(model(x), y))
            scheduler.step()
    assert rates == [0.1] * 6 + [0.05] * 6 + [0.025] * 6


@pytest.mark.parametrize("name", BY_STEP)
def test_it_resumes_where_it_was(name: str, tmp_path: Path) -> None:
    """A checkpoint has the schedulers of the loop, as it has those of a Task."""
    settings: dict[str, Any] = {"enable_checkpointing": True, "ckpt_path": "auto"}
    whole, rates = in_a_loop(
        tmp_path / "whole", BY_STEP[name], callbacks=[ModelCheckpoint()], **settings
    )
    _, first = in_a_loop(
        tmp_path / "parts", BY_STEP[name], 5, callbacks=[ModelCheckpoint()], **settings
    )
    parts, rest = in_a_loop(
        tmp_path / "parts", BY_STEP[name], callbacks=[ModelCheckpoint()], **settings
    )
    assert len(first) == 5 and first + rest == rates
    assert torch.equal(parts, whole)


def test_its_rates_are_scaled_for_several_ranks(tmp_path: Path) -> None:
    """At 2 ranks the whole schedule is twice as high, as one that the Trainer steps;
    the user's script stays as it is.
    """
    _, rates = plain(BY_STEP["from zero"], lr=0.2)

    def work(engine: Any) -> list[float]:
        return in_a_loop(tmp_path, BY_STEP["from zero"], engine=engine, max_epochs=2)[1]

    for used in World(2).run(work):
        assert used == pytest.approx(rates[: len(used)], rel=1e-12)
        assert len(used) == ROWS // BATCH


def falling(step: int, *, num_training_steps: int) -> float:
    """The factor of a schedule as transformers makes it."""
    return 1 - step / num_training_steps


@pytest.mark.parametrize(
    "make_schedule",
    [
        lambda each, n: lr_scheduler.OneCycleLR(each, 0.2, epochs=1, steps_per_epoch=n),
        lambda each, n: lr_scheduler.LambdaLR(each, partial(falling, num_training_steps=n)),
    ],
    ids=["OneCycleLR", "LambdaLR"],
)
def test_a_schedule_of_the_whole_loaders_length_is_said(
    make_schedule: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script for DDP makes it of len(loader), the batches of one rank, which are those of all
    ranks here: it would end half way.
    """
    data = loader(ROWS)

    def work(engine: Any) -> None:
        model, optimizer = make()
        cycle = make_schedule(optimizer, len(data))
        with loop_of(model, optimizer, data, engine=engine, run_dir=tmp_path) as loop:
            for x, y in loop.batches():
                loop.backward(functional.mse_loss(model(x), y))
                cycle.step()

    for ranks in (1, 2):
        World(ranks).run(work)
        steps = ROWS // BATCH // ranks
        said = f"LR is made for {len(data)} steps, and the run has {steps} on 2 ranks"
        assert capsys.readouterr().out.count(said) == ranks - 1


def test_a_rate_set_by_hand_holds_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what the user wrote, on any number of ranks and in warm-up: no factor, and one line."""
    model, optimizer = make()
    with loop_of(model, optimizer, loader(ROWS), run_dir=tmp_path, lr_warmup_steps=4) as loop:
        rates = []
        for x, y in loop.batches():
            if loop.global_step == 2:
                optimizer.param_groups[0]["lr"] = 0.03
            rates.append(optimizer.param_groups[0]["lr"])
            loop.backward(functional.mse_loss(model(x), y))
    assert rates == [pytest.approx(0.025), pytest.approx(0.05), *[0.03] * 4]
    said = capsys.readouterr().out
    assert (
        said.count(
            "The learning rate of group 0 was set to 0.03 by your own code, and holds as it is:"
            " without warm-up."
        )
        == 1
    )


def test_schedulers_are_those_of_the_optimizer() -> None:
    """Not another optimizer's, nor parts of a sequence, nor one that the fit steps."""
    (model, optimizer), (_, other) = make(), make()
    assert isinstance(model, nn.Module)
    own = BY_STEP["in a sequence"](optimizer)
    elsewhere = BY_STEP["from zero"](other)
    given = BY_STEP["exponential"](optimizer)
    assert schedulers_of([optimizer], [given]) == [own]
    assert schedulers_of([other], []) == [elsewhere]
