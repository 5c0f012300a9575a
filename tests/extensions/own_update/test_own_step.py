"""A Task's own optimizer_step: around each update, once, with the rates that it sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError, TaskError
from trainkit.loggers import CSVLogger


class Warming(Line):
    """Warms up by hand, as Lightning's page shows it."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.calls: list[tuple[int, int, float]] = []

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Set a rate, update, and halve the rate for whoever reads it."""
        rate = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = optimizer.step(closure=optimizer_closure)
        self.calls.append((epoch, batch_idx, float(loss)))
        for group in optimizer.param_groups:
            group["lr"] = rate / 2


def by_hand(task: Line, steps: int, clip: float | None = None) -> list[float]:
    """Train a model as `Warming` does; return the losses."""
    losses = []
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    for step in range(steps):
        batch = list(loader(16))[step % 4]
        loss = torch.nn.functional.mse_loss(task.model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), clip)
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 4)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [None, 0.1])
def test_it_is_around_each_update(tmp_path: Path, clip: float | None) -> None:
    """With epoch and batch; the rate it sets is that of the update and of the log."""
    task = Warming()
    trainer = quiet(
        tmp_path,
        max_epochs=2,
        gradient_clip_val=clip,
        log_every_n_steps=1,
        logger=CSVLogger(),
    )
    trainer.fit(task, loader(16))
    other = Warming()
    losses = by_hand(other, 8, clip)
    assert [(epoch, index) for epoch, index, _ in task.calls] == [
        (epoch, index) for epoch in range(2) for index in range(4)
    ]
    assert [loss for *_, loss in task.calls] == pytest.approx(losses, abs=1e-6)
    for mine, theirs in zip(task.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert trainer.global_step == 8
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    place = rows[0].split(",").index("lr")
    rates = [float(row.split(",")[place]) for row in rows[1:] if row.split(",")[place]]
    assert rates == pytest.approx([0.025, 0.05, 0.075] + [0.1] * 5)


def test_super_and_several_microbatches(tmp_path: Path) -> None:
    """`super().optimizer_step(*args, **kwargs)` updates; the closure may be called before."""
    calls = []

    class Around(Line):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            """Note the batch."""
            calls.append(args[1])
            super().optimizer_step(*args, **kwargs)

    class Before(Line):
        def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any) -> None:
            """Call the closure by hand."""
            optimizer.zero_grad()
            assert float(closure()) > 0
            optimizer.step()
            optimizer.zero_grad()

    ends = []
    for kind in (Around, Before, Line):
        task = kind()
        trainer = quiet(tmp_path / kind.__name__, accumulate_grad_batches=2)
        trainer.fit(task, loader(16))
        ends.append([p.detach().clone() for p in task.parameters()])
        assert trainer.global_step == 2
    assert calls == [1, 3]
    for weights in ends[:2]:
        assert all(map(torch.equal, weights, ends[2]))


def never(self: Any, *args: Any) -> None:
    """Leave the update out."""


def twice(self: Any, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any) -> None:
    """Update two times."""
    optimizer.step(closure)
    optimizer.step()


def again(self: Any, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any) -> None:
    """Ask for new gradients."""
    closure()
    optimizer.step(closure)


def emptied(self: Any, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any) -> None:
    """Drop the gradients, as for numbers that are not finite."""
    closure()
    optimizer.zero_grad()
    optimizer.step()


def decayed(self: Any, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any) -> None:
    """Shrink the weights, of which the gradients then should be."""
    with torch.no_grad():
        for parameter in self.parameters():
            parameter.mul_(0.9)
    optimizer.step(closure)


def sharply(self: Any, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any) -> None:
    """Update as SAM does."""
    optimizer.first_step(closure)


class Sam(torch.optim.SGD):
    """An optimizer with an update of another name."""

    def first_step(self, closure: Any) -> None:
        """Climb."""
        raise AssertionError


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (never, r"Own\.optimizer_step returned without optimizer\.step\(closure"),
        (twice, r"Own\.optimizer_step steps the optimizer twice"),
        (again, r"Own\.optimizer_step calls the closure twice"),
        (emptied, r"Own\.optimizer_step drops the gradients before the update"),
        (decayed, r"Own\.optimizer_step changes weights before optimizer\.step\(\)"),
        (sharply, r"calls the optimizer's first_step\(\)"),
    ],
)
def test_another_update_is_refused(tmp_path: Path, method: Any, says: str) -> None:
    """With what is for it."""
    configure = {"configure_optimizers": lambda self: Sam(self.parameters(), lr=0.1)}
    own = type("Own", (Line,), {"optimizer_step": method, **configure})
    with pytest.raises(TaskError, match=f"{says}.*automatic_optimization = False"):
        quiet(tmp_path, max_steps=1).fit(own(), loader(8))


def test_several_optimizers_and_manual_optimization_are_refused(tmp_path: Path) -> None:
    """At the start."""

    class Two(Warming):
        def configure_optimizers(self) -> Any:
            """Return two."""
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(TaskError, match="is for one optimizer, and configure_optimizers returns 2"):
        quiet(tmp_path, max_steps=1).fit(Two(), loader(8))
    task = Warming()
    task.automatic_optimization = False
    with pytest.raises(ConfigError, match="optimizer_step needs automatic optimization"):
        quiet(tmp_path, max_steps=1).fit(task, loader(8))


def test_what_it_logs_is_of_the_step(tmp_path: Path) -> None:
    """With validations within the epoch; and one that is set on the instance is called."""
    task = Line()
    losses: list[float] = []

    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        losses.append(float(optimizer.step(closure=closure)))
        task.log("own", losses[-1], on_step=True, on_epoch=True)

    task.optimizer_step = optimizer_step  # type: ignore[method-assign]
    settings = {"val_check_interval": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    trainer = quiet(tmp_path, max_epochs=1, logger=CSVLogger(), **settings)
    trainer.fit(task, loader(16), loader(8))
    assert trainer.callback_metrics["own"] == pytest.approx(sum(losses) / 4)
    assert "own_step" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_an_error_before_the_update_leaves_a_checkpoint(tmp_path: Path) -> None:
    """No weight has changed by then."""

    class Failing(Line):
        def optimizer_step(self, epoch: int, batch_idx: int, *args: Any) -> None:
            """Fail at the third update."""
            if batch_idx == 2:
                raise ValueError("a mistake of the user")
            super().optimizer_step(epoch, batch_idx, *args)

    with pytest.raises(ValueError, match="a mistake"):
        quiet(
            tmp_path,
            max_epochs=1,
            callbacks=[ModelCheckpoint(save_on_exception=True)],
            enable_checkpointing=True,
        ).fit(Failing(), loader(16))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert any("step=2" in name for name in names), names
