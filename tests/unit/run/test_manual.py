"""Manual optimization: Tasks that run their optimizers themselves,
on any number of ranks as on one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, fill, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.contents import GRADIENTS
from trainkit.checkpoint.format import load_training
from trainkit.errors import ConfigError, TaskError


class Gan(Task):
    """Two networks that are trained in turns, in double precision;
    the noise is a function of the samples.
    """

    def __init__(self, penalty: bool = False, critic_steps: int = 1, toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        fill(self)
        self.penalty, self.critic_steps, self.toggles = penalty, critic_steps, toggles

    def judge(self, real: Tensor, fake: Tensor) -> Tensor:
        """Return the critic's loss."""
        loss = self.critic(fake).mean() - self.critic(real).mean()
        if self.penalty:
            between = (0.5 * (real + fake)).detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
            loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train the critic, then the generator."""
        x, real = batch[0].double(), batch[1].double()
        g, c = self.optimizers()
        for _ in range(self.critic_steps):
            if self.toggles:
                self.toggle_optimizer(c)
            loss = self.judge(real, self.generator(x).detach())
            c.zero_grad()
            self.manual_backward(loss)
            c.step()
            if self.toggles:
                self.untoggle_optimizer(c)
        self.log("critic", loss, on_epoch=True)
        if self.toggles:
            self.toggle_optimizer(g)
        loss = -self.critic(self.generator(x)).mean()
        g.zero_grad()
        self.manual_backward(loss)
        g.step()
        if self.toggles:
            self.untoggle_optimizer(g)

    def configure_optimizers(self) -> Any:
        """Return an optimizer for each network."""
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.05, momentum=0.9),
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
        ]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization over SGD (Foret et al. 2021),
    with the usual two steps and a closure.
    """

    def __init__(self, params: Any, lr: float, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["climb"] = p.grad * (self.param_groups[0]["rho"] / norm)
            p.add_(self.state[p]["climb"])

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back, and descend by the gradient found above."""
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p].pop("climb")).sub_(p.grad, alpha=group["lr"])

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Do both; `closure` runs backward again."""
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class Regression(Line):
    """A line in double precision that is trained by hand."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.double()
        self.automatic_optimization, self.kind = False, kind

    def loss(self, batch: Any) -> Tensor:
        """Return the mean squared error."""
        return functional.mse_loss(self(batch[0].double()), batch[1].double())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Update as `kind` says."""
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        if self.kind in ("sam closure", "lbfgs"):
            optimizer.step(closure)
            return
        if self.kind == "accumulated":
            self.accumulate(batch, batch_idx)
            return
        closure()
        if self.kind == "sam":
            optimizer.first_step()
            closure()
            optimizer.second_step()
        else:
            if self.kind == "clipped":
                self.clip_gradients(optimizer, 0.1)
            optimizer.step()

    def accumulate(self, batch: Any, batch_idx: int) -> None:
        """Update every second batch, and clip after each."""
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        self.clip_gradients(optimizer, 0.4)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the kind."""
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(
                self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe"
            )
        return (
            Sam(self.parameters(), 0.05)
            if "sam" in self.kind
            else torch.optim.SGD(self.parameters(), lr=0.05)
        )


TASKS: dict[str, Callable[[], Task]] = {
    "gan": Gan,
    "gan without toggling": lambda: Gan(toggles=False),
    "wgan-gp": lambda: Gan(penalty=True, critic_steps=3),
    "plain": Regression,
    "sam": lambda: Regression("sam"),
    "sam closure": lambda: Regression("sam closure"),
    "lbfgs": lambda: Regression("lbfgs"),
    "clipped": lambda: Regression("clipped"),
    "accumulated": lambda: Regression("accumulated"),
}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_one_process_with_all_samples(kind: str, ranks: int, tmp_path: Path) -> None:
    """N ranks with batches of 12 / N give the weights of one with 12,
    through a short last step too.
    """

    def work(engine: ThreadEngine) -> tuple[Tensor, int]:
        task = TASKS[kind]()
        trainer = quiet(tmp_path, engine=engine, lr_scaling="none", max_epochs=2)
        trainer.fit(
            task,
            loader(
                43, 12 // engine.ranks.world_size if engine.ranks.world_size > 1 else 12 // ranks
            ),
        )
        return weights(task), trainer.state.global_step

    alone = TASKS[kind]()
    quiet(tmp_path, lr_scaling="none", max_epochs=2).fit(alone, loader(43, 12))
    assert not torch.equal(weights(alone), weights(TASKS[kind]()))
    for found, steps in World(ranks).run(work):
        torch.testing.assert_close(found, weights(alone), rtol=0, atol=1e-10)
        assert steps == {
            "gan": 16,
            "gan without toggling": 16,
            "wgan-gp": 32,
            "accumulated": 4,
        }.get(kind, 8), "calls of optimizer.step()"


def test_gradients_that_are_changed_before_their_sum_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own clipping would clip one rank's part: one line says so, and what clips the sum."""

    class Clips(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()

    def work(engine: ThreadEngine) -> None:
        quiet(tmp_path, engine=engine).fit(Clips(), loader(12, 2))

    World(2).run(work)
    assert capsys.readouterr().out.count("To clip the sum, call self.clip_gradients(") == 1
    quiet(tmp_path).fit(Clips(), loader(12, 2))
    World(2).run(lambda engine: quiet(tmp_path, engine=engine).fit(Gan(), loader(12, 2)))
    assert "clip" not in capsys.readouterr().out


def test_a_backward_of_ones_own_is_refused_on_several_ranks(tmp_path: Path) -> None:
    """Its gradients would be summed, where DDP averages them."""

    class Plain(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.loss(batch).backward()
            optimizer.step()

    def work(engine: ThreadEngine) -> None:
        with pytest.raises(
            TaskError, match=r"Plain calls backward\(\) of a loss itself.*manual_back"
        ):
            quiet(tmp_path, engine=engine).fit(Plain(), loader(12, 2))

    World(2).run(work)
    quiet(tmp_path).fit(Plain(), loader(12, 2))


@pytest.mark.parametrize("way", ["torch's", "the run's", "by a scaler"])
def test_a_step_of_torchs_own_optimizer_is_refused(way: str, tmp_path: Path) -> None:
    """It would leave the other ranks' gradients out in silence, and max_steps would never end."""

    class Raw(Line):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(functional.mse_loss(self(batch[0]), batch[1]))
            if way == "torch's":
                optimizer.optimizer.step()
            elif way == "the run's":
                self.trainer.optimizers[0].step()
            else:
                scaler = torch.amp.GradScaler("cpu")
                scaler.scale(torch.ones(()))
                scaler.step(optimizer.optimizer)

    task = Raw()
    with pytest.raises(TaskError, match=r"Raw steps torch's own optimizer.*self\.optimizers\(\)"):
        quiet(tmp_path, max_epochs=1, max_steps=2).fit(task, loader(8))
    task.trainer.optimizers[0].step()  # after the fit it is the user's


def test_one_rank_trains_as_a_hand_written_loop(tmp_path: Path) -> None:
    """A GAN's weights are bit for bit those of plain torch."""
    task, plain = Gan(toggles=False), Gan(toggles=False)
    quiet(tmp_path).fit(task, loader(16))
    g, c = plain.configure_optimizers()
    for batch in loader(16):
        x, real = batch[0].double(), batch[1].double()
        c.zero_grad()
        plain.judge(real, plain.generator(x).detach()).backward()
        c.step()
        g.zero_grad()
        (-plain.critic(plain.generator(x)).mean()).backward()
        g.step()
    assert torch.equal(weights(task), weights(plain))


def test_hooks_schedules_and_clipping_keep_their_meaning(tmp_path: Path) -> None:
    """Each update calls the hooks; schedulers move if the Task moves them;
    gradient_clip_val clips the sum over ranks.
    """
    calls: list[str] = []

    class Spy(Callback):
        def note(self, task: Any) -> None:
            calls.append("clipped" if float(task.model.weight.grad.norm()) <= 0.1001 else "whole")

        def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
            self.note(task)

        def on_train_batch_end(
            self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.note(task)

    class Scheduled(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.08)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    trainer = quiet(tmp_path, callbacks=Spy(), gradient_clip_val=0.1, lr_warmup_steps=2)
    trainer.fit(Scheduled(), loader(12))
    assert calls == ["whole", "clipped"] * 3
    assert trainer.run.rates.last() == [pytest.approx(0.08 * 0.25)]
    assert trainer.run.rates.current() == [pytest.approx(0.01)]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains(precision: str, tmp_path: Path) -> None:
    """The loss is scaled and the gradients unscaled, for each optimizer."""
    task, before = Regression(), weights(Regression())
    task.float()
    trainer = quiet(tmp_path, precision=precision, max_epochs=40)
    trainer.fit(_single(task), loader(8))
    assert trainer.state.skipped_steps < 40
    exact = Regression()
    quiet(tmp_path, max_epochs=40).fit(exact, loader(8))
    assert not torch.equal(weights(task), before)
    torch.testing.assert_close(weights(task), weights(exact), rtol=0.1, atol=0.05)


class Clipped(Line):
    """Two optimizers: both clip before both step, or each clips and steps."""

    def __init__(self, in_turn: bool) -> None:
        super().__init__()
        self.float()
        self.second = nn.Linear(3, 1)
        fill(self)
        self.in_turn = in_turn
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Update both."""
        x, y = batch[0].float(), batch[1].float()
        optimizers = self.optimizers()
        for optimizer, layer in zip(optimizers, (self.model, self.second), strict=True):
            optimizer.zero_grad()
            self.manual_backward((layer(x).squeeze(-1) - y).square().mean())
        for optimizer in optimizers:
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            if self.in_turn:
                optimizer.step()
        for optimizer in () if self.in_turn else optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        """Return one for each layer."""
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.model, self.second)]


def test_a_loss_scale_changes_once_a_batch(tmp_path: Path) -> None:
    """One optimizer's overflow halves it after both have stepped: the other's gradients are of the
    scale before, and its weights as if they had been unscaled first.
    """

    class Overflows(Clipped):
        seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.seen += 1
            if self.seen == 10:
                hook = self.model.weight.register_hook(lambda grad: grad * torch.inf)
            super().training_step(batch, batch_idx)
            if self.seen == 10:
                hook.remove()

    tasks = Overflows(in_turn=True), Overflows(in_turn=False)
    for task in tasks:
        trainer = quiet(tmp_path, precision="16-mixed", max_epochs=6)
        trainer.fit(task, loader(8))
        assert 0 < trainer.state.skipped_steps < 6
    assert torch.equal(weights(tasks[0]), weights(tasks[1]))


def test_two_optimizers_clip_before_both_step_under_a_loss_scale(tmp_path: Path) -> None:
    """As each clips and steps; the first step ended in torch's error for the second."""
    tasks = Clipped(in_turn=True), Clipped(in_turn=False)
    for task in tasks:
        quiet(tmp_path, precision="16-mixed", max_epochs=3).fit(task, loader(8))
    assert torch.equal(weights(tasks[0]), weights(tasks[1]))
    assert not torch.equal(weights(tasks[0]), weights(Clipped(in_turn=True)))


@pytest.mark.parametrize("kind", ["sam closure", "sam", "lbfgs"])
def test_several_gradients_a_step_have_no_loss_scale(kind: str, tmp_path: Path) -> None:
    """An overflow would be written into the weights, and torch unscale twice; bf16-mixed trains."""
    task = _single(Regression(kind).float())
    with pytest.raises(
        TaskError, match=r"(step\(closure\)|first_step\(\)) under trainer\.precision"
    ):
        quiet(tmp_path / "fp16", precision="16-mixed", max_epochs=1).fit(task, loader(8))
    quiet(tmp_path / "bf16", precision="bf16-mixed", max_epochs=1).fit(task, loader(8))


def _single(task: Regression) -> Regression:
    task.loss = lambda batch: functional.mse_loss(task(batch[0]), batch[1])  # type: ignore[method-assign]
    return task


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Both optimizers' states are saved, and the counters."""
    whole, first, second = Gan(), Gan(), Gan()
    quiet(tmp_path / "a", max_epochs=4).fit(whole, loader(12))
    quiet(tmp_path / "b", max_epochs=2, callbacks=ModelCheckpoint()).fit(first, loader(12))
    quiet(tmp_path / "b", max_epochs=4).fit(second, loader(12), ckpt_path="last")
    assert torch.equal(weights(whole), weights(second))


class Window(Line):
    """Updates in each fourth batch of an epoch, and may end after a batch."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.last = last
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Sum gradients, or count them."""
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 4)
        if batch_idx % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        self.trainer.should_stop = batch_idx == self.last

    def loss(self, batch: Any) -> Tensor:
        """Return that of a batch."""
        return (self.model(batch[0]) - batch[1]).square().mean()


class Beside(Window):
    """Another optimizer of the same layer, or of a second one, steps in each batch."""

    def __init__(self, last: int | None = None, shared: bool = False) -> None:
        super().__init__(last)
        self.second = nn.Linear(3, 1).double()
        fill(self.second)
        self.shared = shared

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Sum the gradients of the one, and update the other."""
        late, often = self.optimizers()
        if not self.shared:
            often.zero_grad()
            self.manual_backward((self.second(batch[0].double()) - batch[1]).square().mean())
            often.step()
        self.manual_backward(self.loss(batch) / 4)
        if batch_idx % 4 == 3:
            late.step()
            late.zero_grad()
        self.trainer.should_stop = batch_idx == self.last

    def configure_optimizers(self) -> Any:
        """Return both."""
        second = self.model if self.shared else self.second
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.model, second)]


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_an_optimizer_that_waits_beside_another_are_saved(
    shared: bool, tmp_path: Path
) -> None:
    """Those of each optimizer that has had no update; a weight of two has its gradient once."""
    whole, second = Beside(shared=shared), Beside(shared=shared)
    quiet(tmp_path / "a", max_epochs=1).fit(whole, loader(40))
    keeper = ModelCheckpoint()
    quiet(tmp_path / "b", max_epochs=1, callbacks=keeper).fit(Beside(5, shared), loader(40))
    saved = load_training(tmp_path / "b" / "checkpoints" / "last")[GRADIENTS][0]
    assert [gradient is not None for gradient in saved][:2] == [True, True]
    assert len(saved) == (2 if shared else 4) and not any(g is not None for g in saved[2:])
    quiet(tmp_path / "b", max_epochs=1).fit(second, loader(40), ckpt_path="last")
    torch.testing.assert_close(weights(second), weights(whole), rtol=0, atol=1e-6)


def test_a_checkpoint_of_an_error_says_which_gradients_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the batches since the last update, which the failed batch has changed."""

    class Fails(Window):
        def loss(self, batch: Any) -> Tensor:
            if self.trainer.state.batch_idx == fails_at:
                raise ValueError("here")
            return super().loss(batch)

    for fails_at, says in ((6, True), (4, False)):  # noqa: B007 - read by the Task
        with pytest.raises(ValueError, match="here"):
            keeper = ModelCheckpoint(save_on_exception=True)
            quiet(tmp_path, max_epochs=1, callbacks=keeper).fit(Fails(), loader(40))
        said = capsys.readouterr()
        assert ("lacks the gradients of the batches" in said.out + said.err) == says


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("last", [5, None])
def test_gradients_that_no_update_has_counted_are_saved(
    last: int | None, ranks: int, tmp_path: Path
) -> None:
    """A run that stops within a window of batches, or at an epoch's end within one, resumes as if it
    had not; also on one rank less.
    """
    whole, first, second = Window(), Window(last), Window()
    quiet(tmp_path / "a", max_epochs=2).fit(whole, loader(40))

    def begin(engine: Any) -> None:
        data = loader(40, batch_size=4 // ranks)
        task = first if ranks == 1 else Window(last)
        keeper = ModelCheckpoint()
        settings = {"engine": engine, "max_epochs": 1, "callbacks": keeper}
        quiet(tmp_path / "b", lr_scaling="none", **settings).fit(task, data)

    World(ranks).run(begin)
    quiet(tmp_path / "b", max_epochs=2).fit(second, loader(40), ckpt_path="last")
    torch.testing.assert_close(weights(second), weights(whole), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            {"accumulate_grad_batches": 2},
            "trainer.accumulate_grad_batches needs automatic optimization",
        ),
        ({"stop_on_nonfinite": True}, "trainer.stop_on_nonfinite needs automatic optimization"),
        ({"halve_batch_on_oom": True}, "trainer.halve_batch_on_oom needs automatic optimization"),
    ],
)
def test_what_needs_one_update_a_step_is_refused(
    setting: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A setting that has no meaning is refused, with what to do."""
    with pytest.raises(ConfigError, match=words):
        quiet(tmp_path, **setting).fit(Gan(), loader(8))


def test_each_rank_needs_a_sample(tmp_path: Path) -> None:
    """If the last step has fewer samples than ranks, some rank would not call the optimizers."""

    def work(engine: ThreadEngine) -> None:
        with pytest.raises(
            ConfigError,
            match=r"last step of an epoch has 1 samples for 2 ranks.*pad_last_step=true",
        ):
            quiet(tmp_path, engine=engine).fit(Gan(), loader(9))
        quiet(tmp_path, engine=engine, pad_last_step=True).fit(Gan(), loader(9))

    World(2).run(work)


def test_methods_of_manual_optimization_say_where_they_belong(tmp_path: Path) -> None:
    """Without the switch, or outside of a fit, they name what to do."""
    with pytest.raises(TaskError, match="no Trainer runs this Task yet"):
        Line().optimizers()
    with pytest.raises(
        TaskError,
        match=r"manual_backward.*Set self\.automatic_optimization = False in Line\.__init__",
    ):
        Line().manual_backward(torch.zeros(()))

    class Steps(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step()

    with pytest.raises(
        TaskError, match=r"optimizers\(\)\.step\(\) is for manual optimization: the Trainer updates"
    ):
        quiet(tmp_path).fit(Steps(), loader(8))
    with pytest.raises(TaskError, match="outside of a fit"):
        Gan().manual_backward(torch.zeros(()))

    class Automatic(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(TaskError, match=r"LBFGS.*automatic_optimization = False"):
        quiet(tmp_path).fit(Automatic(), loader(8))
