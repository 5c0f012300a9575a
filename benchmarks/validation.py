"""The cost of evaluation beside a bare loop, and of a switch from training to validation and back.

    python -m benchmarks.validation [--short] [--json FILE]

One process, one thread, an MLP 16-32-4, batches of 32 in memory; the metric is the mean loss over
all samples, which all contenders must agree on. Quiet otherwise. They take turns:

    bare loop       model.eval(), torch.inference_mode(), a weighted sum, model.train()
    trainkit        trainer.validate, trainer.fit
    pytorch-ignite  create_supervised_evaluator with its Loss metric; run by an event of a training
    Engine
    Lightning       trainer.validate, trainer.fit

A batch: the mean time from one forward pass to the next within an evaluation. The call: the whole
of it, less its batches. The switch: a training with a validation of one batch after every step,
less the same training without: one validation's forward pass and metric, and the way there and
back. Medians over rounds.
"""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import trainkit
from benchmarks.harness import Cell, Findings, Table, absent, main, take_turns
from benchmarks.peers import Batch, nothing_printed, sgd, tiny_batches, tiny_mlp

BARE = "bare loop"
loss_of = nn.functional.cross_entropy


class Noted(nn.Module):
    """The model; records the start of its forward passes, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny_mlp()
        self.trained: list[float] = []
        self.evaluated: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        (self.trained if self.training else self.evaluated).append(time.perf_counter())
        logits: Tensor = self.net(inputs)
        return logits


class Batches:
    """Batches in memory, to be iterated again and again. (A list would be a list of loaders.)"""

    def __init__(self, number: int) -> None:
        self._batches = tiny_batches(number)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


@dataclass
class Contender:
    """How one of them works.

    Attributes:
        evaluate: returns the mean loss of a model over batches.
        train: trains on batches; with others to validate on, on all of those after each step.
    """

    evaluate: Callable[[Noted, Batches], float]
    train: Callable[[Noted, Batches, Batches | None], None]


def evaluate_by_hand(model: Noted, batches: Batches) -> float:
    """Evaluate."""
    model.eval()
    total, samples = torch.zeros(()), 0
    with torch.inference_mode():
        for inputs, labels in batches:
            total += loss_of(model(inputs), labels) * len(inputs)
            samples += len(inputs)
    model.train()
    return float(total / samples)


def train_by_hand(model: Noted, batches: Batches, validation: Batches | None) -> None:
    """Train."""
    optimizer = sgd(model.parameters())
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()
        if validation is not None:
            evaluate_by_hand(model, validation)


class Task(trainkit.Task):
    """The model under trainkit."""

    def __init__(self, model: Noted) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return loss_of(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val/loss", loss_of(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return sgd(self.parameters())


def trainkit_trainer(folder: str, **settings: Any) -> trainkit.Trainer:
    """Return a quiet trainer."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return trainkit.Trainer(
        run_dir=folder, max_epochs=1, num_sanity_val_steps=0, **(quiet | settings)
    )


def evaluate_by_trainkit(model: Noted, batches: Batches) -> float:
    """Evaluate."""
    with tempfile.TemporaryDirectory() as folder:
        return trainkit_trainer(folder).validate(Task(model), batches)["val/loss"]


def train_by_trainkit(model: Noted, batches: Batches, validation: Batches | None) -> None:
    """Train."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainkit_trainer(folder, val_check_interval=None if validation is None else 1)
        trainer.fit(Task(model), batches, validation)


def evaluate_by_lightning(model: Noted, batches: Batches) -> float:
    """Evaluate."""
    return float(_lightning().validate(_module(model), batches, verbose=False)[0]["val/loss"])


def train_by_lightning(model: Noted, batches: Batches, validation: Batches | None) -> None:
    """Train."""
    _lightning(val_check_interval=None if validation is None else 1).fit(
        _module(model), batches, validation
    )


def _lightning(**settings: Any) -> Any:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    one = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    return lightning.Trainer(**(quiet | one | settings))


def _module(model: Noted) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", loss_of(self.model(batch[0]), batch[1]), batch_size=len(batch[0]))

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters())

    return Module()


def evaluate_by_ignite(model: Noted, batches: Batches) -> float:
    """Evaluate."""
    value = float(_evaluator(model).run(batches).metrics["loss"])
    model.train()
    return value


def train_by_ignite(model: Noted, batches: Batches, validation: Batches | None) -> None:
    """Train."""
    from ignite.engine import Engine, Events

    optimizer = sgd(model.parameters())

    # it sets the mode, as create_supervised_trainer's does
    def step(engine: Any, batch: Batch) -> None:
        model.train()
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        optimizer.step()

    engine = Engine(step)
    if validation is not None:
        evaluator = _evaluator(model)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: evaluator.run(validation))
    engine.run(batches, max_epochs=1)


def _evaluator(model: Noted) -> Any:
    from ignite.engine import create_supervised_evaluator
    from ignite.metrics import Loss

    return create_supervised_evaluator(model, metrics={"loss": Loss(loss_of)})


CONTENDERS = {
    BARE: Contender(evaluate_by_hand, train_by_hand),
    "trainkit": Contender(evaluate_by_trainkit, train_by_trainkit),
    "pytorch-ignite": Contender(evaluate_by_ignite, train_by_ignite),
    "Lightning": Contender(evaluate_by_lightning, train_by_lightning),
}


def evaluation(contender: Contender, batches: Batches) -> list[float]:
    """Evaluate once; return [us of a batch, ms of the call beside its batches]."""
    model, begin = Noted(), time.perf_counter()
    value = contender.evaluate(model, batches)
    took, seen = time.perf_counter() - begin, model.evaluated
    assert len(seen) == len(batches)
    assert math.isclose(value, evaluate_by_hand(Noted(), batches), rel_tol=1e-5), value
    batch = (seen[-1] - seen[0]) / (len(seen) - 1)
    return [1e6 * batch, 1e3 * (took - len(batches) * batch)]


def switch(contender: Contender, steps: int) -> list[float]:
    """Train without and with a validation of one batch after each step;
    return the added time of a step, in us.
    """
    taken: list[list[float]] = []
    for validation in (None, Batches(1)):
        model = Noted()
        contender.train(model, Batches(steps), validation)
        assert (len(model.trained), len(model.evaluated)) == (
            steps,
            0 if validation is None else steps,
        )
        taken.append(
            [
                1e6 * (after - before)
                for before, after in zip(model.trained, model.trained[1:], strict=False)
            ]
        )
    plain = statistics.median(taken[0])
    return [statistics.median(taken[1]) - plain]


def measure(short: bool) -> Findings:
    """Let all take turns, at both."""
    torch.set_num_threads(1)
    missing = absent({"pytorch-ignite": "ignite", "Lightning": "lightning"})
    present = {name: contender for name, contender in CONTENDERS.items() if name not in missing}
    number, steps, rounds = (20, 5, 1) if short else (1000, 300, 7)
    with nothing_printed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = Batches(number)
        evaluated = take_turns(
            {name: partial(evaluation, contender, batches) for name, contender in present.items()},
            rounds,
        )
        switched = take_turns(
            {name: partial(switch, contender, steps) for name, contender in present.items()}, rounds
        )
    rows: list[list[Cell]] = []
    for name in present:
        batch, call = (statistics.median(taken[i] for taken in evaluated[name]) for i in (0, 1))
        added = statistics.median(
            mine[0] - bare[0] for mine, bare in zip(evaluated[name], evaluated[BARE], strict=True)
        )
        rows.append(
            [
                name,
                batch,
                added if name != BARE else None,
                call,
                statistics.median(taken[0] for taken in switched[name]),
            ]
        )
    columns = [
        "",
        "a batch, us",
        "over the bare loop, us",
        "the call, ms",
        "a switch with one batch, us",
    ]
    settings: dict[str, Cell] = {
        "threads": 1,
        "batch_size": 32,
        "batches": number,
        "steps": steps,
        "rounds": rounds,
    }
    return Findings([Table("Validation of a tiny MLP", columns, rows)], [], missing, settings)


if __name__ == "__main__":
    main(measure)
