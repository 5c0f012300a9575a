"""Behaviours of two ranks, each in both trainers: a script for DDP, started by torchrun."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from tests.same_names.kit import Framework, data, weights
from tests.same_names.resumes import renamed
from tests.same_names.table import ROWS_OF_RANKS, differs, equal, refused

equal_on_ranks = partial(equal, table=ROWS_OF_RANKS)


def in_order(kit: Framework, rows: int = 32, **options: Any) -> Any:
    """Return a training loader that is not shuffled:
    in Lightning by a sampler, without which it shuffles.
    """
    loader = data(rows, batch=4)
    if kit.name == "lightning":
        options["sampler"] = DistributedSampler(loader.dataset, shuffle=False)
    return DataLoader(loader.dataset, batch_size=4, **options)


def places(batch: Any) -> list[float]:
    """Return what names the samples of a batch."""
    return [round(float(x), 4) for x in batch[0][:, 0]]


def seen(kit: Framework, loader: Any, **settings: Any) -> list[list[float]]:
    """Return the samples of each batch that a rank trains on in an epoch."""
    batches: list[list[float]] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        batches.append(places(batch))
        loss: Tensor = self.loss(batch)
        return loss

    kit.trainer(max_epochs=1, **settings).fit(kit.line(training_step=training_step), loader)
    return batches


def fitted(kit: Framework, loader: Any, **settings: Any) -> list[float]:
    """Return the weights after a fit."""
    task = kit.line()
    kit.trainer(**settings).fit(task, loader)
    return weights(task)


def validated(kit: Framework, rows: int, **members: Any) -> dict[str, float]:
    """Return what a validation of an untrained task logs."""
    trainer = kit.trainer()
    trainer.validate(kit.line(**members), data(rows, batch=4), verbose=False)
    return {name: round(float(value), 4) for name, value in trainer.callback_metrics.items()}


@equal_on_ranks
def two_ranks_train(kit: Framework) -> Any:
    """The weights after two epochs, in the loader's order, with lr_scaling="none"."""
    return fitted(kit, in_order(kit))


@equal_on_ranks
def clipped(kit: Framework) -> Any:
    """The weights with accumulate_grad_batches=2 and gradient_clip_val=0.5."""
    return fitted(kit, in_order(kit), accumulate_grad_batches=2, gradient_clip_val=0.5)


@equal_on_ranks
def weights_of_rank_0(kit: Framework) -> Any:
    """All ranks start with rank 0's weights."""
    task = kit.line()
    task.layer.weight.data += int(torch.distributed.get_rank())
    kit.trainer(max_epochs=1).fit(task, in_order(kit))
    return weights(task)


@equal_on_ranks
def names_of_ranks(kit: Framework) -> Any:
    """global_rank, local_rank, world_size, is_global_zero, num_devices, num_training_batches,
    estimated_stepping_batches.
    """
    read: list[Any] = []

    def on_train_start(self: Any) -> None:
        trainer = self.trainer
        read.extend([self.global_rank, self.local_rank, trainer.global_rank, trainer.local_rank])
        read.extend([trainer.world_size, trainer.is_global_zero, trainer.num_devices])
        read.extend([trainer.num_training_batches, trainer.estimated_stepping_batches])

    task = kit.line(on_train_start=on_train_start)
    trainer = kit.trainer()
    trainer.fit(task, in_order(kit))
    return [*read, trainer.global_step]


@equal_on_ranks
def a_rate_around_the_update(kit: Framework) -> Any:
    """A rate that is set in optimizer_step."""

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + self.trainer.global_step)
        optimizer.step(closure=closure)

    task = kit.line(optimizer_step=optimizer_step)
    trainer = kit.trainer(max_epochs=2)
    trainer.fit(task, in_order(kit))
    return weights(task), trainer.global_step


@equal_on_ranks
def clipping_by_torch(kit: Framework) -> Any:
    """configure_gradient_clipping with torch's clip_grad_norm_: the gradients are those of all ranks."""

    def clips(self: Any, optimizer: Any, *args: Any, **more: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    task = kit.line(configure_gradient_clipping=clips)
    kit.trainer(max_epochs=2).fit(task, in_order(kit))
    return weights(task)


@equal_on_ranks
def gathers(kit: Framework) -> Any:
    """all_gather of tensors, numbers, dicts and lists; a text is left alone."""
    read: list[Any] = []

    def on_train_start(self: Any) -> None:
        rank = self.global_rank
        nested = self.all_gather({"a": torch.tensor([rank, 2]), "b": [float(rank)], "c": "text"})
        read.extend([nested["a"].tolist(), nested["b"][0].tolist(), nested["c"]])

    kit.trainer(max_epochs=1).fit(kit.line(on_train_start=on_train_start), in_order(kit))
    return read


@equal_on_ranks
def reductions(kit: Framework) -> Any:
    """log(sync_dist=True) in validation_step and in on_validation_epoch_end, with each reduce_fx."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        for reduction in ("mean", "sum", "min", "max"):
            value = float(self.global_rank + 1)
            self.log(reduction, value, sync_dist=True, reduce_fx=reduction)

    def on_validation_epoch_end(self: Any) -> None:
        for reduction in ("mean", "sum", "min", "max"):
            value = float(self.global_rank + 1)
            self.log(f"end_{reduction}", value, sync_dist=True, reduce_fx=reduction)

    hooks = {"on_validation_epoch_end": on_validation_epoch_end}
    return validated(kit, 16, validation_step=validation_step, **hooks)


@equal_on_ranks
def of_rank_zero(kit: Framework) -> Any:
    """log(rank_zero_only=True) in validation_step: rank 0's mean."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("rank", float(self.global_rank), rank_zero_only=True)

    logged = validated(kit, 16, validation_step=validation_step)
    return logged if torch.distributed.get_rank() == 0 else {}


@equal_on_ranks
def metric_objects(kit: Framework) -> Any:
    """A metric object: logged, and computed in on_validation_epoch_end."""
    torchmetrics: Any = __import__("torchmetrics")

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        for metric in (self.logged, self.computed):
            metric.update(self(batch[0]), batch[1])
        self.log("logged", self.logged)

    def on_validation_epoch_end(self: Any) -> None:
        self.log("computed", self.computed.compute())
        self.computed.reset()

    hooks = {"on_validation_epoch_end": on_validation_epoch_end}
    task = kit.line(validation_step=validation_step, **hooks)
    task.logged, task.computed = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()
    trainer = kit.trainer()
    trainer.validate(task, data(16, batch=4), verbose=False)
    return {name: round(float(value), 4) for name, value in trainer.callback_metrics.items()}


@equal_on_ranks
def updated_gradients(kit: Framework) -> Any:
    """The gradients in on_before_optimizer_step are those of all ranks."""
    read: list[Any] = []

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        read.append([round(x, 4) for x in self.layer.weight.grad.reshape(-1).tolist()])

    hooks = {"on_before_optimizer_step": on_before_optimizer_step}
    kit.trainer(max_epochs=1).fit(kit.line(**hooks), in_order(kit))
    return read


def by_hand(kit: Framework, clip: Any) -> Any:
    """Return the weights after an epoch of manual optimization."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        clip(self, optimizer)
        optimizer.step()

    task = kit.line(training_step=training_step)
    task.automatic_optimization = False
    kit.trainer(max_epochs=1).fit(task, in_order(kit))
    return weights(task)


@equal_on_ranks
def clip_gradients(kit: Framework) -> Any:
    """self.clip_gradients under manual optimization."""
    return by_hand(kit, lambda task, optimizer: task.clip_gradients(optimizer, 0.5, "norm"))


@differs(
    "There the rate stays; here it grows with the global batch, as the banner says:"
    ' `lr_scaling="none"` leaves it.',
    ROWS_OF_RANKS,
)
def rate(kit: Framework) -> Any:
    """The learning rate that configure_optimizers sets."""
    read: list[float] = []

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        read.append(self.optimizers().param_groups[0]["lr"])

    hooks = {"on_train_batch_start": on_train_batch_start}
    scaling = {} if kit.name == "lightning" else {"lr_scaling": "linear"}
    kit.trainer(max_epochs=1, **scaling).fit(kit.line(**hooks), in_order(kit))
    return read


@differs(
    "There `strategy=ddp` shuffles it; here it keeps its order, as on one rank. Ask for"
    " `shuffle=True`.",
    ROWS_OF_RANKS,
)
def unshuffled(kit: Framework) -> Any:
    """A training loader without shuffle=True."""
    return seen(kit, data(16, batch=4))


@differs(
    "There samples are repeated so that ranks have as many; here each comes once, and a step"
    " is the mean over its samples.",
    ROWS_OF_RANKS,
)
def uneven(kit: Framework) -> Any:
    """An epoch of 13 samples on two ranks, in training and in validation."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    count = sum(len(batch) for batch in seen(kit, in_order(kit, 13)))
    return count, validated(kit, 13, validation_step=validation_step)


@differs(
    "There without sync_dist each rank has its own mean, and monitors it; here it is that of"
    " all ranks, on all ranks.",
    ROWS_OF_RANKS,
)
def not_synced(kit: Framework) -> Any:
    """log in validation_step without sync_dist."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("rank", float(self.global_rank))

    return validated(kit, 16, validation_step=validation_step)


@differs(
    "There it is the mean over ranks; here a step's value is rank 0's, and a line says so. With"
    " on_epoch=True the epoch's is that of all ranks.",
    ROWS_OF_RANKS,
)
def step_synced(kit: Framework) -> Any:
    """log(sync_dist=True) of a step's value, in a logger."""
    read: list[float] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        self.log("rank", float(self.global_rank + 1), sync_dist=True)
        loss: Tensor = self.loss(batch)
        return loss

    logger = kit.loggers.CSVLogger(str(kit.folder / "csv"))
    trainer = kit.trainer(max_epochs=1, logger=logger, log_every_n_steps=1)
    trainer.fit(kit.line(training_step=training_step), in_order(kit))
    if trainer.is_global_zero:
        for file in kit.folder.rglob("metrics.csv"):
            head, *rows = [line.split(",") for line in file.read_text().splitlines()]
            read.extend(float(row[head.index("rank")]) for row in rows)
    return read


@differs(
    "There they are averaged over ranks by then; here they are this rank's part until"
    " optimizer.step() sums them. Read them in on_before_optimizer_step; under manual optimization"
    " clip by self.clip_gradients, not by torch's function: a line says so. Hooks of your own on"
    " weights (register_hook) see that part too: what they clamp is a share.",
    ROWS_OF_RANKS,
)
def early_gradients(kit: Framework) -> Any:
    """p.grad in on_after_backward, and after manual_backward."""
    read: list[Any] = []

    def on_after_backward(self: Any) -> None:
        read.append([round(x, 4) for x in self.layer.weight.grad.reshape(-1).tolist()])

    hooks = {"on_after_backward": on_after_backward}
    kit.trainer(max_epochs=1).fit(kit.line(**hooks), in_order(kit))

    def clip(task: Any, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(task.parameters(), 0.5)

    return read, by_hand(kit, clip)


@differs(
    "There a rank gets the results of its own batches; here all ranks get those of all, in the"
    " data's order, none twice.",
    ROWS_OF_RANKS,
)
def predicted(kit: Framework) -> Any:
    """What predict returns."""

    def predict_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        first: Tensor = batch[0][:, 0]
        return first

    loader = data(13, batch=4)
    answers = kit.trainer().predict(kit.line(predict_step=predict_step), loader)
    return [[round(x, 4) for x in answer.tolist()] for answer in answers]


class Stream(IterableDataset[Any]):
    """A data set without places."""

    def __iter__(self) -> Iterator[Any]:
        yield from data(16).dataset


@differs(
    "There each rank reads the whole of it; here ranks take turns with its batches, so an epoch has"
    " half the steps. Ranks that read parts of their own: `trainkit.sharded(loader)`.",
    ROWS_OF_RANKS,
)
def streamed(kit: Framework) -> Any:
    """An IterableDataset that does not look at the rank."""
    return seen(kit, DataLoader(Stream(), batch_size=4))


class Noise(torch.utils.data.Dataset[Any]):
    """Samples that draw random numbers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> Any:
        return torch.rand(2), torch.zeros(1)


@differs(
    "There all ranks draw the same numbers; here each sample has its own, on any number of ranks.",
    ROWS_OF_RANKS,
)
def drawn(kit: Framework) -> Any:
    """Random numbers of a data set, without loader workers, after seed_everything."""
    kit.root.seed_everything(7)
    return seen(kit, DataLoader(Noise(), batch_size=4))


@refused("has a DistributedSampler", ROWS_OF_RANKS)
def own_sampler(kit: Framework) -> Any:
    """A DistributedSampler of your own"""
    samples = data(16).dataset
    return seen(kit, DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples)))


@refused("trainkit.sharded", ROWS_OF_RANKS)
def no_sampler(kit: Framework) -> Any:
    """use_distributed_sampler=False, unless trainkit.sharded says what each rank reads"""
    return seen(kit, data(16, batch=4), use_distributed_sampler=False)


@refused("carry no gradients", ROWS_OF_RANKS)
def gathered_gradients(kit: Framework) -> Any:
    """all_gather(sync_grads=True)"""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        total: Tensor = self.all_gather(self.layer(batch[0]), sync_grads=True).sum()
        return total

    return kit.trainer(max_epochs=1).fit(kit.line(training_step=training_step), data(16, batch=4))


@equal_on_ranks
def renamed_on_ranks(kit: Framework) -> Any:
    """A Task that renames weights in on_save_checkpoint and on_load_checkpoint, and resumes."""
    return renamed(kit, in_order(kit))


@equal_on_ranks
def state_of_each_rank(kit: Framework) -> Any:
    """A callback's and a DataModule's state that depends on the rank: all ranks read rank 0's."""
    read: list[Any] = []
    rank = int(torch.distributed.get_rank())

    class Notes(kit.Callback):  # type: ignore[name-defined, misc]
        def state_dict(self) -> Any:
            return {"rank": rank}

        def load_state_dict(self, state_dict: Any) -> None:
            read.append(state_dict["rank"])

    class Own(kit.DataModule):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> Any:
            return in_order(kit)

        state_dict = Notes.state_dict
        load_state_dict = Notes.load_state_dict

    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "first"))
    kit.trainer(callbacks=[Notes(), saving], enable_checkpointing=True).fit(
        kit.line(), datamodule=Own()
    )
    path = saving.best_model_path
    kit.trainer(callbacks=[Notes()], max_epochs=3).fit(kit.line(), datamodule=Own(), ckpt_path=path)
    return read
