"""The gradient of a step is that of the mean loss over its samples;
and the legal results of training_step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.threads import World
from tests.helpers.toy import Line, Net, Recorder, loader, quiet, rows, weights
from trainkit.errors import TaskError


def by_hand(batch_size: int, accumulate: int, epochs: int = 1, **sgd: Any) -> torch.Tensor:
    """Return the weights of a plain loop over global batches of 23 rows, in float64."""
    task = Line(**sgd).double()
    optimizer = task.configure_optimizers()
    x_NI, y_NO = (t.double() for t in rows(23).tensors)
    for _ in range(epochs):
        for start in range(0, 23, batch_size * accumulate):
            batch = slice(start, start + batch_size * accumulate)
            optimizer.zero_grad()
            functional.mse_loss(task(x_NI[batch]), y_NO[batch]).backward()
            optimizer.step()
    return weights(task)


@pytest.mark.parametrize("accumulate", [1, 2, 3, 6])
@pytest.mark.parametrize("sgd", [{}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_accumulation_equals_the_whole_batch(
    tmp_path: Path, accumulate: int, sgd: dict[str, Any]
) -> None:
    """However a step is split into microbatches, short last ones included,
    the weights are the plain loop's.
    """
    task = Line(**sgd)
    quiet(tmp_path, max_epochs=2, precision="64-true", accumulate_grad_batches=accumulate).fit(
        task, loader(23)
    )
    torch.testing.assert_close(weights(task), by_hand(4, accumulate, 2, **sgd), rtol=0, atol=1e-12)


class Tokens(Line):
    """Weighs each sample by a number of its own, as tokens of sequences are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean over tokens, and their number."""
        x, y = batch
        tokens = 1 + (10 * x[:, :1].abs()).floor()
        loss = ((self(x) - y).square() * tokens).sum() / tokens.sum()
        return {"loss": loss, "num_samples": tokens.sum()}


class BatchWeights(Tokens):
    """The same, by the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean over tokens."""
        return super().training_step(batch, batch_idx)["loss"]

    def batch_weight(self, batch: Any) -> Any:
        """Return the batch's tokens."""
        return (1 + (10 * batch[0][:, :1].abs()).floor()).sum()


def test_a_weight_of_the_batch_is_one_line(tmp_path: Path) -> None:
    """`batch_weight` weighs as a returned num_samples does."""
    by_step, by_batch = Tokens(), BatchWeights()
    for task in (by_step, by_batch):
        quiet(tmp_path, max_steps=2, accumulate_grad_batches=2).fit(task, loader(23))
    assert torch.equal(weights(by_step), weights(by_batch))
    assert not torch.equal(weights(by_batch), weights(Line()))


def test_a_tasks_own_weights_are_used(tmp_path: Path) -> None:
    """If the task returns num_samples,
    the step's gradient is that of the mean over all its tokens.
    """
    task, plain = Tokens(), Line().double()
    quiet(tmp_path, max_steps=1, precision="64-true", accumulate_grad_batches=3).fit(
        task, loader(11)
    )
    x_NI, y_NO = (t.double() for t in rows(11).tensors)
    tokens = 1 + (10 * x_NI[:, :1].abs()).floor()
    (((plain(x_NI) - y_NO).square() * tokens).sum() / tokens.sum()).backward()
    plain.configure_optimizers().step()
    torch.testing.assert_close(weights(task), weights(plain), rtol=0, atol=1e-12)


def test_a_weight_of_two_optimizers_is_divided_once(tmp_path: Path) -> None:
    """Both step with the gradient of the mean, of which there is one."""

    class Twice(Tokens):
        def configure_optimizers(self) -> Any:
            return [
                super().configure_optimizers(),
                torch.optim.SGD([self.model.weight], lr=0.1),
            ], []

    task, once = Twice(), Tokens(lr=0.1)
    settings: dict[str, Any] = {
        "max_steps": 1,
        "precision": "64-true",
        "accumulate_grad_batches": 3,
    }
    quiet(tmp_path / "twice", **settings).fit(task, loader(11))
    before = Line().double().model.weight.detach().clone()
    quiet(tmp_path / "once", **settings).fit(once, loader(11))
    torch.testing.assert_close(
        task.model.weight - before, 2 * (once.model.weight - before), rtol=0, atol=1e-12
    )


def test_weights_in_some_batches_only_are_refused(tmp_path: Path) -> None:
    """A task weighs all its batches or none: a mixture has no mean."""

    class Sometimes(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "num_samples": 3} if batch_idx % 2 else {"loss": loss}

    with pytest.raises(
        TaskError, match=r"Sometimes\.training_step returned 'num_samples' for some batches"
    ):
        quiet(tmp_path, accumulate_grad_batches=2).fit(Sometimes(), loader(23))


def test_clipping_is_of_the_whole_steps_gradient(tmp_path: Path) -> None:
    """The norm over all parameters is clipped once a step, after accumulation;
    lower norms do not change.
    """
    norms, used = [], []
    for settings in ({}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 1e9}):
        recorder = Recorder()
        quiet(tmp_path, max_steps=1, accumulate_grad_batches=2, callbacks=recorder, **settings).fit(
            Line(), loader(23)
        )
        norms += recorder.norms
        used += recorder.used
    assert used == [norms[0], pytest.approx(0.5, rel=1e-5), norms[0]]
    assert norms == [norms[0]] * 3, "a hook before the update sees what backward has left"
    assert norms[0] > 0.5


def test_clipping_by_value_is_of_each_element(tmp_path: Path) -> None:
    """With algorithm "value" each element is cut off, and the rest is left as it is."""
    seen: list[list[float]] = []

    class Look(Line):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(self.model.weight.grad.reshape(-1).tolist())

    for settings in ({}, {"gradient_clip_val": 0.8, "gradient_clip_algorithm": "value"}):
        quiet(tmp_path, max_steps=1, **settings).fit(Look(), loader(23))
    free, cut = seen
    assert cut == pytest.approx([max(-0.8, min(0.8, g)) for g in free])
    assert free != cut


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_batch_that_is_skipped_weighs_nothing(
    accumulate: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step's gradient is the mean over its other samples;
    one line says that batches are skipped.
    """

    class Skips(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)

    class Weighs(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            weight = 0 if batch_idx % 3 == 1 else len(batch[0])
            return {"loss": super().training_step(batch, batch_idx), "num_samples": weight}

    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    skips, weighs = Skips(), Weighs()
    quiet(tmp_path / "a", **settings).fit(skips, loader(23))
    said = capsys.readouterr().out
    quiet(tmp_path / "b", **settings).fit(weighs, loader(23))
    assert torch.allclose(weights(skips), weights(weighs), rtol=0, atol=1e-12)
    assert said.count("Skips.training_step returned None: the batch is skipped.") == 1


def test_an_epoch_without_a_loss_is_an_error(tmp_path: Path) -> None:
    """A training_step without its return ends the fit at the end of its first epoch;
    one that skips the batches of a part of it does not, nor of the part after a resume.
    """

    class Forgets(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx < self.first else None

    task = Forgets()
    task.first = 0
    with pytest.raises(TaskError, match="Forgets.training_step returned None for all 6 batches of"):
        quiet(tmp_path / "all", max_epochs=2).fit(task, loader(23))
    task.first = 4
    beginning = quiet(tmp_path / "some", max_steps=4)
    beginning.fit(task, loader(23))
    beginning.save_checkpoint(tmp_path / "after 4")
    quiet(tmp_path / "rest", max_epochs=1).fit(
        task, loader(23), ckpt_path=str(tmp_path / "after 4")
    )


def test_one_rank_alone_cannot_skip_a_batch(tmp_path: Path) -> None:
    """The others have its samples in their mean; a Task that weighs its batches can."""

    class Skips(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if self.global_rank == 0 else None

    class Weighs(Skips):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if loss is None else {"loss": loss, "num_samples": len(batch[0])}

        def batch_weight(self, batch: Any) -> Any:
            return len(batch[0])

    def work(engine: Any, task: Line) -> Any:
        before = weights(task).clone()
        quiet(tmp_path, engine=engine, max_steps=2).fit(task, loader(16))
        return weights(task), before

    with pytest.raises(TaskError, match="returned None to skip a batch, on one of 2 ranks"):
        World(2).run(lambda engine: work(engine, Skips()))
    (one, before), (other, _) = World(2).run(lambda engine: work(engine, Weighs()))
    assert torch.equal(one, other) and not torch.equal(one, before)


def test_unused_parameters_stay_untouched(tmp_path: Path) -> None:
    """A parameter without gradient is not moved by momentum or weight decay."""

    class Idle(Line):
        def __init__(self) -> None:
            super().__init__(momentum=0.9, weight_decay=0.5)
            self.idle = torch.nn.Parameter(torch.ones(3))

    task = Idle()
    quiet(tmp_path).fit(task, loader(23))
    assert task.idle.tolist() == [1.0, 1.0, 1.0]
    assert task.idle.grad is None


def test_a_parameter_that_is_no_longer_used_stands_still(tmp_path: Path) -> None:
    """A parameter with a gradient only in the first step is moved only by that step,
    even with momentum.
    """
    seen: list[float] = []

    class Once(Line):
        def __init__(self) -> None:
            super().__init__(momentum=0.9, weight_decay=0.5)
            self.extra = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.extra.item())
            loss = super().training_step(batch, batch_idx)
            return loss * self.extra if batch_idx == 0 else loss

    quiet(tmp_path).fit(Once(), loader(23))
    assert seen[0] == 1.0
    assert seen[1] != 1.0
    assert set(seen[1:]) == {seen[1]}


@pytest.mark.parametrize("form", ["tensor", "dict", "one element"])
def test_forms_of_a_loss(tmp_path: Path, form: str) -> None:
    """A scalar, a tensor of one element and a dict with "loss" train alike."""

    class Forms(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {
                "tensor": loss,
                "dict": {"loss": loss, "more": 1},
                "one element": loss.reshape(1, 1),
            }[form]

    task, plain = Forms(), Line()
    quiet(tmp_path).fit(task, loader(23))
    quiet(tmp_path).fit(plain, loader(23))
    assert torch.equal(weights(task), weights(plain))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda loss: 0.5, "returned float; it must return the loss"),
        (lambda loss: {"los": loss}, "returned a dict without 'loss'"),
        (lambda loss: loss.expand(2), r"returned a loss of shape \[2\]; .* Return its mean"),
        (lambda loss: loss.detach(), "returned a loss without grad"),
        (lambda loss: {"loss": torch.tensor(loss.item())}, "returned a loss without grad"),
    ],
)
def test_what_is_no_loss_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    """A result that cannot be trained on is refused with the task's name and the legal results."""

    class Wrong(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return make(super().training_step(batch, batch_idx))

    with pytest.raises(TaskError, match=rf"^Wrong\.training_step {words}"):
        quiet(tmp_path).fit(Wrong(), loader(4))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_graph_that_had_a_backward_is_refused_with_what_to_do(
    tmp_path: Path, keeps: bool
) -> None:
    """Of a step that runs backward itself, and of one that keeps a tensor of the last batch."""

    class Again(Line):
        last: Tensor | float = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx) + self.last
            if keeps:
                self.last = loss
            else:
                loss.backward()
            return loss

    with pytest.raises(TaskError, match=r"itself: leave it out.*hidden state: keep tensor.detach"):
        quiet(tmp_path).fit(Again(), loader(8))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)]
)
def test_true_precisions_cast_weights_and_inputs(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    """With a true precision weights, inputs and loss are of that dtype."""
    seen: set[torch.dtype] = set()

    class Look(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            seen.update({batch[0].dtype, loss.dtype, self.model[0].weight.dtype})
            return loss

    quiet(tmp_path, precision=precision).fit(Look(), loader(23), loader(4))
    assert seen == {dtype}


class Gentle(Line):
    """A loss so small that fp16's first loss scale does not overflow."""

    def __init__(self) -> None:
        super().__init__(lr=100.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a thousandth of the loss, for a thousand times the rate."""
        return super().training_step(batch, batch_idx) / 1000


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)]
)
def test_mixed_precisions_compute_in_half(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    """With a mixed precision the weights stay float32, and the layers compute in half;
    training comes near float32.
    """
    seen: set[torch.dtype] = set()

    class Look(Gentle):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.add(out.dtype)
            return out

    task, plain = Look(), Line()
    quiet(tmp_path, precision=precision).fit(task, loader(23))
    quiet(tmp_path).fit(plain, loader(23))
    assert (seen, task.model.weight.dtype) == ({dtype}, torch.float32)
    torch.testing.assert_close(weights(task), weights(plain), rtol=0.05, atol=0.02)


def test_an_overflow_of_fp16_holds_the_update_back(tmp_path: Path) -> None:
    """Gradients that are not finite skip the update and the schedule;
    the step counts, and the run continues.
    """

    class Overflow(Gentle):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 else loss

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    task, recorder = Overflow(), Recorder()
    trainer = quiet(tmp_path, precision="16-mixed", callbacks=recorder)
    trainer.fit(task, loader(16))
    assert (trainer.global_step, trainer.state.skipped_steps) == (4, 1)
    assert recorder.lrs == pytest.approx([100, 50, 50, 25])
    assert weights(task).isfinite().all()


def test_a_gradient_from_before_does_not_count(tmp_path: Path) -> None:
    """What a broken-off run left in .grad is dropped when a fit starts."""
    results = []
    for left in (None, torch.full((1, 3), 1e6)):
        task = Line()
        task.model.weight.grad = left
        quiet(tmp_path, max_steps=1).fit(task, loader(8))
        results.append(task.model.weight.detach().clone())
    assert torch.equal(*results)


def test_gradients_of_parameters_without_optimizer_do_not_pile_up(tmp_path: Path) -> None:
    """A parameter that no optimizer updates has no gradient after a step."""

    class Scaled(Line):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(self.norm(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    task = Scaled()
    quiet(tmp_path).fit(task, loader(8))
    assert task.norm.weight.grad is None


class Masked(Line):
    """Weighs its batches; of one all is masked."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = torch.full((len(batch[0]), 1), float(batch_idx != 1))
        loss = ((self(batch[0]) - batch[1]).square() * mask).sum() / mask.sum().clamp(min=1)
        return {"loss": loss, "num_samples": mask.sum()}


def test_a_step_of_no_weight_changes_nothing(tmp_path: Path) -> None:
    """It has no gradient, as in a plain loop, and no NaN."""
    ends = []
    for steps in (1, 2):
        task = Masked()
        quiet(tmp_path / str(steps), max_steps=steps).fit(task, loader(16))
        ends.append(weights(task))
    assert torch.equal(*ends)
    assert ends[0].isfinite().all()


@pytest.mark.parametrize("hooks", [{}, {"on_before_zero_grad": lambda self, optimizer: None}])
def test_the_gradients_of_a_step_are_its_own(tmp_path: Path, hooks: dict[str, Any]) -> None:
    """Those of the step before are dropped, before the next backward at the latest."""
    seen: list[float] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.model.weight.sum()

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        seen.append(float(self.model.weight.grad.mean()))

    mine = {
        "training_step": training_step,
        "on_before_optimizer_step": on_before_optimizer_step,
        **hooks,
    }
    quiet(tmp_path, max_epochs=2).fit(type("Mine", (Line,), mine)(), loader(8, 4))
    assert seen == [1.0] * 4
