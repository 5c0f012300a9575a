"""pytorch-ignite's engines, as https://docs.pytorch.org/ignite writes them (v0.5.5).

A checkpoint of its DeterministicEngine has random states that torch.load takes with
weights_only=False alone; one from others is loaded as its page does, with weights_only.
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.engine.deterministic import DeterministicEngine
from ignite.handlers import (
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    EMAHandler,
    LRScheduler,
    global_step_from_engine,
)
from ignite.metrics import Accuracy, Average, Loss
from ignite.utils import manual_seed
from torch import nn
from torch.utils.data import DistributedSampler

from benchmarks.conformance.trainers import by_hand
from benchmarks.conformance.work import (
    Fit,
    Model,
    Pair,
    Record,
    Scored,
    make_optimizer,
    make_schedule,
    train_data,
)

IMPORT = "import ignite.distributed, ignite.engine, ignite.handlers, ignite.metrics"


def loader_of(data: Any, fit: Fit, shuffle: bool) -> Any:
    """Return a loader for each rank: auto_dataloader takes the whole batch of all ranks, and shares
    workers out. With checkpoints there are two a rank: the page of DeterministicEngine says of
    resuming that it is for a loader with workers.
    """
    options = {} if fit.data == "stream" else {"shuffle": shuffle}
    size, workers = fit.batch * idist.get_world_size(), fit.workers
    if fit.save_every and fit.data == "map":
        workers = 2 * idist.get_nproc_per_node()
    return idist.auto_dataloader(data, batch_size=size, num_workers=workers, **options)


def step_of(fit: Fit, model: nn.Module, optimizer: Any) -> Any:
    """Return the training step, with accumulation as `supervised_training_step` does it."""
    scaler = torch.amp.GradScaler("cpu", enabled=fit.precision == "16")

    def step(engine: Engine, batch: Any) -> Any:
        if (engine.state.iteration - 1) % fit.accumulate == 0:
            optimizer.zero_grad()
        model.train()
        with torch.autocast("cpu", torch.float16, enabled=fit.precision == "16"):
            loss = model(**batch)["loss"]
        scaler.scale(loss / fit.accumulate).backward()
        if engine.state.iteration % fit.accumulate == 0:
            if fit.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), fit.clip)
            scaler.step(optimizer)
            scaler.update()
        return loss.detach(), batch["i"]

    return step


def fit(fit: Fit, record: Record) -> None:
    """Train."""
    manual_seed(0)
    if "WORLD_SIZE" in os.environ:
        limit = timedelta(seconds=fit.limit_of_hangs or 1800)
        idist.initialize("gloo", timeout=limit)
    inner = Model(fit, record)
    model = idist.auto_model(inner)
    optimizer = record.watch(make_optimizer(fit, inner.parameters()))
    kind = DeterministicEngine if fit.data == "map" else Engine  # it asks for the length of data
    engine = kind(step_of(fit, model, optimizer))
    parts: dict[str, Any] = {"model": inner, "optimizer": optimizer, "trainer": engine}
    every = Events.ITERATION_COMPLETED(every=fit.accumulate)
    if fit.schedule:
        parts["schedule"] = make_schedule(optimizer)
        starts = Events.ITERATION_STARTED(every=fit.accumulate)
        engine.add_event_handler(starts, LRScheduler(parts["schedule"]))
    if fit.ema:
        average = EMAHandler(inner, momentum=0.1)
        average.attach(engine, event=every)
        parts["average"] = average.ema_model
    Loss(lambda loss, _: loss, batch_size=len).attach(engine, "loss")
    loader = loader_of(train_data(fit), fit, fit.shuffle)
    if isinstance(loader.sampler, DistributedSampler):  # as its setup_common_training_handlers

        @engine.on(Events.EPOCH_STARTED)
        def set_epoch() -> None:
            loader.sampler.set_epoch(engine.state.epoch - 1)

    evaluator = evaluator_of(fit, record, engine, parts)
    if fit.save_every:
        files = DiskSaver(str(record.checkpoints), require_empty=False)
        steps = global_step_from_engine(engine, Events.ITERATION_COMPLETED)
        saver = Checkpoint(parts, files, n_saved=None, global_step_transform=steps)
        if evaluator is not None:  # after each validation
            evaluator.add_event_handler(Events.COMPLETED, saver)
        else:
            due = Events.ITERATION_COMPLETED(every=fit.save_every * fit.accumulate)
            engine.add_event_handler(due, saver)
    if fit.resume:
        newest = max(record.checkpoints.glob("checkpoint_*.pt"), key=lambda p: p.stat().st_mtime)
        Checkpoint.load_objects(parts, torch.load(newest, weights_only=fit.untrusted))
    length = fit.rows // fit.batch if fit.data == "stream" else None
    engine.run(loader, max_epochs=fit.epochs, epoch_length=length)
    record.keep(inner)
    if fit.ema:
        record.average = {n: v.clone() for n, v in parts["average"].state_dict().items()}
    record.values |= {"loss": engine.state.metrics["loss"], "epochs": engine.state.epoch}
    if evaluator is not None and not fit.scores:
        record.values["score"] = float(evaluator.state.metrics["score"])
    if "WORLD_SIZE" in os.environ:
        idist.finalize()


def evaluator_of(fit: Fit, record: Record, engine: Engine, parts: dict[str, Any]) -> Engine | None:
    """Return the evaluator, run after each epoch, with early stopping and the best checkpoint;
    enter these into what a checkpoint holds.
    """
    if not fit.validation:
        return None
    evaluator = Engine(lambda _, batch: batch["score"][:, None])
    Average().attach(evaluator, "score")
    val = loader_of(Scored(fit), Fit(batch=fit.batch), shuffle=False)

    @engine.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        evaluator.run(val)

    def score(_: Engine) -> float:
        return -fit.scores[engine.state.epoch - 1]

    if fit.scores:
        folder = DiskSaver(str(record.checkpoints / "best"), require_empty=False)
        best = Checkpoint({"model": parts["model"]}, folder, n_saved=1, score_function=score)
        parts["best"] = best
        evaluator.add_event_handler(Events.COMPLETED, best)

        @evaluator.on(Events.COMPLETED)
        def note() -> None:
            name = best.last_checkpoint or ""
            record.values["best"] = str(-float(str(name).rpartition("_")[2].removesuffix(".pt")))

    if fit.patience is not None:
        stopping = EarlyStopping(fit.patience, score, engine)
        parts["stopping"] = stopping
        evaluator.add_event_handler(Events.COMPLETED, stopping)
    return evaluator


def gan(fit: Fit, record: Record) -> None:
    """Train a generator and a critic, as its DCGAN example does."""
    manual_seed(0)
    model = Pair(fit, record)
    generator, critic = model.optimizers()

    def step(engine: Engine, batch: Any) -> None:
        for optimizer, loss in ((critic, model.critic_loss), (generator, model.generator_loss)):
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()

    engine = DeterministicEngine(step)
    parts = {"model": model, "generator": generator, "critic": critic, "trainer": engine}
    saver = Checkpoint(parts, DiskSaver(str(record.checkpoints), require_empty=False))
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=fit.save_every), saver)
    if fit.resume:
        newest = max(record.checkpoints.glob("checkpoint_*.pt"), key=lambda p: p.stat().st_mtime)
        Checkpoint.load_objects(parts, torch.load(newest, weights_only=fit.untrusted))
    engine.run(loader_of(train_data(fit), fit, fit.shuffle), max_epochs=fit.epochs)
    record.keep(model)


def accuracy(fit: Fit, record: Record) -> None:
    """Validate with its metric Accuracy."""
    idist.initialize("gloo")
    evaluator = Engine(
        lambda _, batch: (torch.eye(3)[batch["score"].long() * 0], batch["score"].long() % 3)
    )
    Accuracy().attach(evaluator, "accuracy")
    evaluator.run(loader_of(Scored(fit), Fit(batch=fit.batch), shuffle=False))
    record.values["accuracy"] = evaluator.state.metrics["accuracy"]
    idist.finalize()


def fit_synchronised(given: Fit, record: Record) -> None:
    """Train with batch norm over all ranks: auto_model's sync_bn, which is torch's own."""
    by_hand.fit_synchronised(given, record)


def load_weights(given: Fit, record: Record) -> None:
    """Load a file of weights into objects."""
    Checkpoint.load_objects({"model": Model(Fit(), record)}, given.options["weights"])


def set_up() -> None:
    """Do what a process does once, before its runs."""
    warnings.simplefilter("ignore")
