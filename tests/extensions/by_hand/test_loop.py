"""trainkit.Loop: a loop written by hand trains as the Trainer does with a Task."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from tests.helpers.elastic_threads import ElasticThreadEngine, Job, Killed
from tests.helpers.threads import World
from tests.helpers.toy import Line, Net, Numbered, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.callbacks import Elastic, ModelCheckpoint
from trainkit.checkpoint.weights import read_weights
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.by_hand.task import GivenOptimizers

SETTINGS: dict[str, Any] = {
    "max_epochs": 2,
    "global_batch_size": 24,
    "gradient_clip_val": 0.5,
    "lr_warmup_steps": 2,
}


def make(task: type[Line] = Line, **sgd: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, as a script makes them."""
    model = task(**sgd).model
    return model, torch.optim.SGD(model.parameters(), **{"lr": 0.1} | sgd)


def loop_of(
    model: nn.Module, optimizer: Any, *data: Any, run_dir: Path, **settings: Any
) -> trainkit.Loop:
    """Return a Loop that shows nothing and writes nothing, unless `settings` change that."""
    silent: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False
    )
    return trainkit.Loop(
        model, optimizer, *data, run_dir=str(run_dir), **silent | {"max_epochs": 1} | settings
    )


def train(
    loop: trainkit.Loop, model: nn.Module, each: Callable[[int], None] = lambda step: None
) -> Tensor:
    """Write the loop by hand; return the weights."""
    with loop:
        for _ in loop.epochs():
            for x, y in loop.batches():
                loss = functional.mse_loss(model(x), y)
                loop.backward(loss)
                each(loop.global_step)
                loop.log("train/loss", loss)
            for x, y in loop.validation():
                assert torch.is_inference_mode_enabled() or not torch.is_grad_enabled()
                assert not model.training
                loop.log("val/loss", functional.mse_loss(model(x), y))
    return weights(model)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "settings", [SETTINGS, SETTINGS | {"precision": "bf16-mixed", "val_check_interval": 2}]
)
def test_the_weights_and_the_history_are_those_of_a_task(
    ranks: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit, with uneven shards, accumulation, clipping and warm-up,
    and a validation inside the epoch.
    """

    def by_hand(engine: Any) -> Any:
        model, optimizer = make()
        loop = loop_of(
            model,
            optimizer,
            loader(53),
            loader(10),
            run_dir=tmp_path / "a",
            engine=engine,
            **settings,
        )
        return train(loop, model), loop.history

    def by_trainer(engine: Any) -> Any:
        task = Line()
        history = quiet(tmp_path / "b", engine=engine, **settings).fit(task, loader(53), loader(10))
        return weights(task), history

    for mine, its in zip(World(ranks).run(by_hand), World(ranks).run(by_trainer), strict=True):
        assert torch.equal(mine[0], its[0])
        assert mine[1] == its[1]
        assert len(mine[1]) == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_validation_may_stand_in_a_block_without_gradients(
    block: Any, precision: str, tmp_path: Path
) -> None:
    """As in a plain script: the next epoch trains as it would without the block, and gradients are
    on afterwards.
    """

    def trained(folder: str, block: Any) -> tuple[Tensor, list[dict[str, float]]]:
        model, optimizer = make()
        settings = {"max_epochs": 2, "precision": precision}
        seen: list[bool] = []

        class Modes(Callback):
            def on_train_start(self, trainer: RunView, task: Any) -> None:
                seen.append(torch.is_grad_enabled())

            on_validation_end = on_train_epoch_end = on_train_end = on_train_start

        settings["callbacks"] = [Modes()]
        data = loader(16), loader(8)
        with loop_of(model, optimizer, *data, run_dir=tmp_path / folder, **settings) as loop:
            for _ in loop.epochs():
                for x, y in loop.batches():
                    loop.backward(functional.mse_loss(model(x), y))
                with block():
                    for x, y in loop.validation():
                        assert not torch.is_grad_enabled()
                        loop.log("val/loss", functional.mse_loss(model(x), y))
                assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        assert seen == [True, False, True, False, True, True]
        return weights(model), loop.history

    (mine, values), (plain, wanted) = trained("a", block), trained("b", nullcontext)
    assert torch.equal(mine, plain)
    assert values == wanted


def test_a_run_that_was_stopped_resumes_to_the_bit(tmp_path: Path) -> None:
    """Stopped inside an epoch: order, dropout, momentum, and the user's own state."""

    def run(folder: str, stop_at: int | None = None) -> Tensor:
        torch.manual_seed(1)
        model, optimizer = make(Net, momentum=0.9)
        loop = loop_of(
            model,
            optimizer,
            loader(54, shuffle=True),
            run_dir=tmp_path / folder,
            max_epochs=2,
            callbacks=[ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)],
            enable_checkpointing=True,
            ckpt_path="auto",
        )

        def each(step: int) -> None:
            loop.state["steps"] = loop.state.get("steps", 0) + 1
            assert loop.state["steps"] == step
            if step == stop_at:
                loop.stop()

        return train(loop, model, each)

    whole = run("whole")
    run("parts", stop_at=17)
    assert torch.equal(run("parts"), whole)


def test_an_optimizer_that_a_script_has_loaded_keeps_its_state(tmp_path: Path) -> None:
    """A second Loop with it, and one with the state_dict of a plain loop, continue as that does."""

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
        for _ in range(epochs):
            for x, y in loader(23):
                optimizer.zero_grad()
                functional.mse_loss(model(x), y).backward()
                optimizer.step()

    (wanted, optimizer), (first, of_first) = make(momentum=0.9), make(momentum=0.9)
    plain(wanted, optimizer, 1)
    loaded, of_loaded = make(momentum=0.9)
    loaded.load_state_dict(wanted.state_dict())
    of_loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares its tensors
    plain(wanted, optimizer, 1)
    for model, own, loops in ((first, of_first, 2), (loaded, of_loaded, 1)):
        for number in range(loops):
            train(loop_of(model, own, loader(23), run_dir=tmp_path / str(number)), model)
        torch.testing.assert_close(weights(model), weights(wanted), rtol=1e-5, atol=1e-6)


def test_a_batch_may_have_a_weight_of_its_own(tmp_path: Path) -> None:
    """num_samples weighs the batch in its step:
    here each batch by its number of rows above a bound.
    """
    model, optimizer = make()
    loop = loop_of(model, optimizer, loader(8), run_dir=tmp_path, global_batch_size=8)
    data = next(iter(loader(8, 8)))
    expected = weights(model) - 0.1 * weighted_gradient(model, *data)
    with loop:
        for x, y in loop.batches():
            chosen = x[:, 0] > 0
            loop.backward(
                functional.mse_loss(model(x)[chosen], y[chosen]), num_samples=chosen.sum()
            )
    assert torch.allclose(weights(model), expected, atol=1e-7)


def weighted_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the mean loss over the rows above the bound."""
    chosen = x[:, 0] > 0
    loss = functional.mse_loss(model(x)[chosen], y[chosen])
    return torch.cat(
        [grad.reshape(-1).double() for grad in torch.autograd.grad(loss, list(model.parameters()))]
    )


def test_several_modules_and_a_scheduler(tmp_path: Path) -> None:
    """A dict of modules is saved under its names; the scheduler is stepped after each epoch."""
    models = {"body": nn.Linear(3, 4), "head": nn.Linear(4, 1)}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()]
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers
    ]
    settings = {"max_epochs": 3, "enable_checkpointing": True}
    with loop_of(
        models, optimizers, loader(8), lr_scheduler=schedulers, run_dir=tmp_path, **settings
    ) as loop:
        for _ in loop.epochs():
            for x, y in loop.batches():
                loop.backward(functional.mse_loss(models["head"](models["body"](x)), y))
    assert [values["lr"] for values in loop.history] == [0.1, 0.05, 0.025]
    assert "model.body.weight" in read_weights(str(tmp_path / "checkpoints" / "last"))


def test_values_between_batches_reach_the_loggers_as_they_are(tmp_path: Path) -> None:
    """Outside of a batch there is no mean to take."""
    seen: list[dict[str, float]] = []

    class Listener(Callback):
        def on_metrics(
            self, trainer: RunView, task: Any, metrics: dict[str, float], step: int
        ) -> None:
            seen.append(metrics)

    model, optimizer = make()
    with loop_of(
        model, optimizer, loader(8), run_dir=tmp_path, max_epochs=2, callbacks=[Listener()]
    ) as loop:
        for epoch in loop.epochs():
            for x, y in loop.batches():
                loop.backward(functional.mse_loss(model(x), y))
            loop.log("epoch/own", 10 + epoch)
    assert [values["epoch/own"] for values in seen if "epoch/own" in values] == [10, 11]


def test_several_validation_loaders_have_names_of_their_own(tmp_path: Path) -> None:
    """By number, and in the names of logged values."""
    model, optimizer = make()
    seen: list[int] = []
    with loop_of(
        model, optimizer, loader(8), {"near": loader(4), "far": loader(8)}, run_dir=tmp_path
    ) as loop:
        for _ in loop.epochs():
            for x, _ in loop.batches():
                loop.backward(model(x).mean())
            for x, _ in loop.validation():
                seen.append(loop.dataloader_idx)
                loop.log("val/mean", model(x).mean())
    assert seen == [0, 1, 1]
    assert {"val/mean/near", "val/mean/far"} <= set(loop.history[0])


def test_a_lost_worker_costs_no_sample(tmp_path: Path) -> None:
    """The others' loops continue with the batches of the step taken again;
    the weights are those of an undisturbed run.
    """
    lock, book = threading.Lock(), dict[int, list[tuple[int, list[int]]]]()

    def run(workers: str, killed_at: int | None) -> Tensor:
        ends: list[Tensor] = []

        def work(engine: ElasticThreadEngine) -> None:
            model, optimizer = make()
            data = DataLoader(Numbered(50), batch_size=4, shuffle=True)
            folder = tmp_path / f"{workers}{killed_at}"
            loop = loop_of(
                model,
                optimizer,
                data,
                run_dir=folder,
                engine=engine,
                max_epochs=2,
                callbacks=[Elastic(commit_every_n_steps=2)],
            )
            with loop:
                for _ in loop.epochs():
                    for x, y, numbers in loop.batches():
                        step = loop.global_step
                        if (engine.worker, step) == ("b", killed_at):
                            raise Killed
                        with lock:
                            book.setdefault(step, []).append(
                                (len(engine.job.sizes), numbers.tolist())
                            )
                        loop.backward(functional.mse_loss(model(x), y))
                        loop.log("train/loss", 0.0)
            ends.append(weights(model))

        Job(work, first=len(workers)).run(workers)
        assert len(ends) == len(workers) - (killed_at is not None)
        return ends[0]

    undisturbed = run("abc", None)
    book.clear()
    assert torch.allclose(run("abc", 3), undisturbed, atol=1e-6)
    taken = [number for step in sorted(book) for batch in last_of(book[step]) for number in batch]
    assert sorted(taken) == sorted([*range(50)] * 2)


def last_of(entries: list[tuple[int, list[int]]]) -> list[list[int]]:
    """Return the batches of the last generation that took this step."""
    latest = max(generation for generation, _ in entries)
    return [batch for generation, batch in entries if generation == latest]


MISUSES: dict[str, tuple[Callable[[trainkit.Loop, nn.Module, Any], None], str]] = {}


def misuse(message: str) -> Callable[[Any], Any]:
    """Add a loop that is written wrongly, with its error."""

    def add(function: Any) -> Any:
        MISUSES[function.__name__] = (function, message)
        return function

    return add


@misuse("was not called for this batch")
def forgotten_backward(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """No loss is passed."""
    for x, _ in loop.batches():
        model(x)


@misuse("was called twice for this batch")
def backward_twice(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """Two losses."""
    for x, _ in loop.batches():
        loop.backward(model(x).mean())
        loop.backward(model(x).mean())


@misuse("outside of a batch")
def backward_outside(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """No batch."""
    loop.backward(model(torch.ones(1, 3)).mean())


@misuse("must read loop.batches")
def unread(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """An epoch without a read."""
    for _ in loop.epochs():
        pass


@misuse("must read loop.validation")
def unread_validation(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """Validation data without a loop over them."""
    for _ in loop.epochs():
        for x, _ in loop.batches():
            loop.backward(model(x).mean())


@misuse("was left before its end")
def left(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """A break."""
    for _ in loop.epochs():
        for x, _ in loop.batches():
            loop.backward(model(x).mean())
            break


@misuse(r"optimizer.step\(\) was called in the loop")
def own_step(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """The weights would be updated twice."""
    for x, _ in loop.batches():
        loop.backward(model(x).mean())
        optimizer.step()


CHANGED = "Gradients were changed in the loop"


@misuse(CHANGED)
def dropped_after_backward(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """Only the step's last microbatch would count."""
    for x, _ in loop.batches():
        loop.backward(model(x).mean())
        optimizer.zero_grad()


@misuse(CHANGED)
def dropped_before_backward(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """So it would at the body's beginning."""
    for x, _ in loop.batches():
        model.zero_grad()
        loop.backward(model(x).mean())


@misuse(CHANGED)
def clipped_too_early(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """Before the step's other microbatches."""
    for x, _ in loop.batches():
        loop.backward(model(x).mean())
        nn.utils.clip_grad_norm_(model.parameters(), 1e-9)


@misuse(CHANGED)
def clipped_too_late(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """After the update."""
    for x, _ in loop.batches():
        loop.backward(model(x).mean())
        if loop.global_step:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-9)


@misuse("a loss of shape")
def no_scalar(loop: trainkit.Loop, model: nn.Module, optimizer: Any) -> None:
    """A loss for each sample."""
    for x, _ in loop.batches():
        loop.backward(model(x))


@pytest.mark.parametrize("name", list(MISUSES))
def test_a_loop_that_is_written_wrongly(name: str, tmp_path: Path) -> None:
    """The error says what to write, and the fit is torn down."""
    function, message = MISUSES[name]
    model, optimizer = make()
    ended: list[str] = []

    class Ends(Callback):
        def teardown(self, trainer: RunView, task: Any, stage: str) -> None:
            ended.append(stage)

    with (
        pytest.raises(TaskError, match=message),
        loop_of(
            model,
            optimizer,
            loader(16),
            loader(4),
            run_dir=tmp_path,
            callbacks=[Ends()],
            accumulate_grad_batches=2,
        ) as loop,
    ):
        function(loop, model, optimizer)
    assert ended == ["fit"]


def test_gradients_that_a_step_has_used_may_be_dropped(tmp_path: Path) -> None:
    """The `zero_grad` of a plain loop changes nothing if each batch is a step."""

    def trained(folder: str, drops: bool) -> Tensor:
        model, optimizer = make()
        with loop_of(model, optimizer, loader(16), run_dir=tmp_path / folder) as loop:
            for x, y in loop.batches():
                if drops:
                    optimizer.zero_grad()
                loop.backward(functional.mse_loss(model(x), y))
                if drops:
                    model.zero_grad()
        return weights(model)

    assert torch.equal(trained("a", drops=True), trained("b", drops=False))


@pytest.mark.parametrize("read", [trainkit.Loop.epochs, trainkit.Loop.batches])
def test_a_loop_that_was_not_entered_is_refused(read: Any, tmp_path: Path) -> None:
    """Without `with` there would be no batch, and the script would end without training."""
    with pytest.raises(TaskError, match=r"Write `with trainkit.Loop\(...\) as loop:`"):
        next(read(loop_of(*make(), loader(8), run_dir=tmp_path)))


def test_an_error_in_the_body_is_raised_as_it_is(tmp_path: Path) -> None:
    """And a checkpoint is written, if one is requested on exceptions."""
    model, optimizer = make()
    checkpoint = ModelCheckpoint(save_on_exception=True)
    with (
        pytest.raises(ZeroDivisionError) as error,
        loop_of(
            model,
            optimizer,
            loader(8),
            run_dir=tmp_path,
            callbacks=[checkpoint],
            enable_checkpointing=True,
        ) as loop,
    ):
        for x, _ in loop.batches():
            loop.backward(model(x).mean())
            if loop.global_step == 1:
                1 / 0  # noqa: B018
    assert error.traceback[0].path == Path(__file__)
    assert list((tmp_path / "checkpoints").glob("*-exception"))


def test_a_loop_that_is_left_says_that_nothing_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A `break` out of all loops ends the fit without an error."""
    model, optimizer = make()
    with loop_of(model, optimizer, loader(8), run_dir=tmp_path) as loop:
        for x, _ in loop.batches():
            loop.backward(model(x).mean())
            break
    assert (
        "The loop was left at step 1, and nothing was saved there. To end with a checkpoint, call"
        " loop.stop()." in capsys.readouterr().out
    )


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    """A Task has a loop already; a forward pass in a user's loop cannot be repeated;
    an unknown setting is the Trainer's.
    """
    model, optimizer = make()
    with pytest.raises(ConfigError, match=r"Pass it to Trainer.fit"):
        trainkit.Loop(Line(), optimizer, loader(8))
    with pytest.raises(ConfigError, match="halve_batch_on_oom is true"):
        loop_of(model, optimizer, loader(8), run_dir=tmp_path, halve_batch_on_oom=True)
    with pytest.raises(ConfigError, match="max_epoch"):
        loop_of(model, optimizer, loader(8), run_dir=tmp_path, max_epoch=1)


def test_what_split_weights_cannot_have_is_refused(tmp_path: Path) -> None:
    """A state of whole weights beside parts of them; stages of a pipeline, which the body of a loop
    cannot be cut into. tests/parallel/test_split_weights.py trains on parts.
    """

    class Part(nn.Parameter):
        to_local = None

    model, optimizer = make(momentum=0.9)
    train(loop_of(model, optimizer, loader(8), run_dir=tmp_path), model)
    given = GivenOptimizers(model, [optimizer], [])
    model.weight = Part(model.weight.detach())
    with pytest.raises(ConfigError, match="SGD has a state already .* Give a new optimizer"):
        given(model)

    def in_stages(engine: Any) -> None:
        engine.ranks.pipeline_size = 2
        with loop_of(*make(), loader(8), run_dir=tmp_path, engine=engine):
            pass

    with pytest.raises(ConfigError, match=r"engine\.pipeline is 2, but the body of your own loop"):
        World(1).run(in_stages)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_loaded_state_has_the_layout_of_the_weights(kind: Any, tmp_path: Path) -> None:
    """The fused implementation walks memory: a momentum row by row beside weights by channels would
    mix up elements.
    """
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))
        return model, kind(model.parameters(), lr=0.01, **options)

    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(8, 3, 4, 4, generator=generator)
    data = DataLoader(TensorDataset(pictures, pictures.sum((1, 2, 3))[:, None]), batch_size=4)
    trained: list[Tensor] = []
    for channels_last in (False, True):
        model, optimizer = made()
        for number in range(2):
            settings = {"run_dir": tmp_path / str(number), "channels_last": channels_last}
            train(loop_of(model, optimizer, data, **settings), model)
            model, optimizer, before = *made(), (model.state_dict(), optimizer.state_dict())
            model.load_state_dict(before[0])
            by_rows = {
                number: {
                    name: value.clone(memory_format=torch.contiguous_format)
                    for name, value in own.items()
                }
                for number, own in before[1]["state"].items()
            }
            optimizer.load_state_dict({**before[1], "state": by_rows})
            optimizer.param_groups[0]["fused"] = None
        trained.append(weights(model))
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-5)
