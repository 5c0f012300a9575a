"""The hooks around a batch's way to the device, and the state of a DataModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Net, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.view import RunView
from trainkit.callbacks import ModelCheckpoint
from trainkit.device.transfer import Mover
from trainkit.run.data_sources import DataSources
from trainkit.run.transfer_hooks import with_hooks


class Doubling(Line):
    """Notes its hooks; a batch is doubled after it is on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """A dict that the loader made of the samples, for example."""
        self.seen.append(("before", dataloader_idx))
        return {"x": batch[0], "y": batch[1]}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """On the device."""
        self.seen.append(("after", dataloader_idx))
        return [2 * batch["x"], batch["y"]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Note the batch."""
        self.seen.append(batch[0].sum().item())
        return super().training_step(batch, batch_idx)


def test_a_task_changes_batches_around_their_transfer(tmp_path: Path) -> None:
    """In training and evaluation, with the number of the loader."""
    task = Doubling()
    quiet(tmp_path, num_sanity_val_steps=0).fit(task, loader(4), [loader(4), loader(4)])
    expected = 2 * next(iter(loader(4)))[0].sum().item()
    around = [("before", 0), ("after", 0)]
    assert task.seen == [*around, pytest.approx(expected), *around, ("before", 1), ("after", 1)]


def test_the_hooks_of_a_datamodule_come_first(tmp_path: Path) -> None:
    """As in Lightning: of a hook that both have, the DataModule's is called; the Task's others too."""

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader(4)

        def transfer_batch_to_device(
            self, batch: Any, device: torch.device, dataloader_idx: int
        ) -> Any:
            assert device == torch.device("cpu")
            return {"x": 0 * batch["x"], "y": batch["y"]}

    task = Doubling()
    quiet(tmp_path).fit(task, datamodule=Data())
    assert task.seen == [("before", 0), ("after", 0), 0.0]


def test_what_a_hook_leaves_where_it_is_stays_there() -> None:
    """As in Lightning; its numbers have the type of the run's precision."""

    class Partly(DataModule):
        def transfer_batch_to_device(
            self, batch: Any, device: torch.device, dataloader_idx: int
        ) -> Any:
            return {"x": batch["x"].to(device), "lengths": batch["lengths"]}

    there = torch.device("meta")
    mover = with_hooks(Mover(there, torch.bfloat16), DataSources({}, Partly()), Line(), there)
    moved = mover({"x": torch.ones(2), "lengths": torch.ones(2, dtype=torch.int64)})
    assert (moved["x"].device, moved["x"].dtype) == (there, torch.bfloat16)
    assert (moved["lengths"].device.type, moved["lengths"].dtype) == ("cpu", torch.int64)
    whole = DataModule().transfer_batch_to_device([torch.ones(2)], there, 0)
    assert whole[0].device == there


def test_random_augmentation_after_the_transfer_is_repeated_by_a_resumed_run(
    tmp_path: Path,
) -> None:
    """Its draws are those of dropout: they resume with the checkpoint."""

    class Noisy(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + torch.randn_like(batch[0]), batch[1]]

    def fit(folder: str, steps: int, **more: Any) -> torch.Tensor:
        task = Noisy()
        saving = [ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)]
        quiet(tmp_path / folder, callbacks=saving, max_epochs=2, max_steps=steps).fit(
            task, loader(24), **more
        )
        return weights(task)

    whole = fit("whole", 12)
    fit("parts", 8)
    assert torch.equal(fit("parts", 12, ckpt_path="last"), whole)


def test_the_state_of_a_datamodule_is_in_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If it has one; a checkpoint without it can be resumed, and one with it without a DataModule:
    that is reported.
    """

    class Counting(DataModule):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def train_dataloader(self) -> Any:
            return loader(8)

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    class Count(Callback):
        def on_train_batch_end(
            self, trainer: RunView, task: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            trainer.datamodule.count += 1  # type: ignore[attr-defined]

    first, second = Counting(), Counting()
    for data, epochs in ((first, 1), (second, 2)):
        trainer = quiet(tmp_path, callbacks=[Count(), ModelCheckpoint()], max_epochs=epochs)
        trainer.fit(Line(), datamodule=data, ckpt_path="auto")
    assert (first.count, second.count) == (2, 4)
    assert "no place for" not in capsys.readouterr().out
    quiet(tmp_path, max_epochs=3).fit(Line(), loader(8), ckpt_path="last")
    assert "no place for: the state of a DataModule." in capsys.readouterr().out
    quiet(tmp_path / "b", callbacks=[ModelCheckpoint()]).fit(Line(), loader(8))
    third = Counting()
    quiet(tmp_path / "b", callbacks=[Count(), ModelCheckpoint()], max_epochs=2).fit(
        Line(), datamodule=third, ckpt_path="auto"
    )
    assert third.count == 2


@pytest.mark.parametrize("per_host", [True, False])
def test_data_are_prepared_once_a_host_or_once(per_host: bool, tmp_path: Path) -> None:
    """Here each rank is on a host of its own."""
    calls: list[int] = []

    class Data(DataModule):
        prepare_data_per_node = per_host

        def prepare_data(self) -> None:
            calls.append(0)

        def train_dataloader(self) -> Any:
            return loader(8)

    def work(engine: ThreadEngine) -> None:
        ranks, assign = engine.ranks, engine.ranks.assign
        ranks.assign = lambda rank, size, *_: assign(rank, size, 0, 1)  # type: ignore[method-assign]
        ranks.assign(ranks.rank, ranks.world_size)  # type: ignore[call-arg]
        quiet(tmp_path, engine=engine, max_steps=1).fit(Line(), datamodule=Data())

    World(2).run(work)
    assert len(calls) == 1 + per_host
