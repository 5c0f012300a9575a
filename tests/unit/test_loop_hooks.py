"""The order of all hooks, written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.api.task_hooks import TASK_HOOKS

NOT_HOOKS = {"state_dict", "load_state_dict", "log", "log_dict"}
HOOKS = [
    n
    for n, f in vars(Callback).items()
    if callable(f) and not n.startswith("_") and n not in NOT_HOOKS
]

# Two epochs of two steps of two microbatches, a validation batch after each epoch, one before all.
FIT = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_sanity_check_end",
    "on_train_start",
    # epoch 0
    "on_train_epoch_start",
    # step 1
    "on_train_step_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_train_batch_end",
    "on_train_step_end",
    # step 2: short, one microbatch
    "on_train_step_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_train_batch_end",
    "on_metrics",
    "on_train_step_end",
    # validation
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_metrics",
    "on_validation_end",
    "on_train_epoch_end",
    # epoch 1
    "on_train_epoch_start",
    "on_train_step_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_train_batch_end",
    "on_train_step_end",
    "on_train_step_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_train_batch_end",
    "on_metrics",
    "on_train_step_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_metrics",
    "on_validation_end",
    "on_train_epoch_end",
    # end
    "on_train_end",
    "on_fit_end",
    "teardown",
]


def spy(base: type, names: Any, calls: list[str], prefix: str = "") -> Any:
    """Return a subclass of `base` that writes down the names of its hooks as they are called."""

    def noting(name: str) -> Any:
        return lambda self, *args: calls.append(prefix + name)

    return type("Spy", (base,), {name: noting(name) for name in names})()


def test_the_hooks_of_a_fit(tmp_path: Path) -> None:
    """A fit of two epochs calls exactly these hooks in this order."""
    calls: list[str] = []
    settings: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "num_sanity_val_steps": 1,
        "log_every_n_steps": 2,
    }
    trainer = quiet(tmp_path, max_epochs=2, callbacks=spy(Callback, HOOKS, calls), **settings)
    trainer.fit(Line(), loader(12), loader(4))
    assert calls == FIT


@pytest.mark.parametrize(
    ("entry", "kind"), [("validate", "validation"), ("test", "test"), ("predict", "predict")]
)
def test_the_hooks_of_an_evaluation(tmp_path: Path, entry: str, kind: str) -> None:
    """validate, test and predict call their own hooks, and none of training."""
    calls: list[str] = []
    trainer = quiet(tmp_path, callbacks=spy(Callback, HOOKS, calls))
    getattr(trainer, entry)(Line(), loader(8))
    batch = [f"on_{kind}_batch_start", f"on_{kind}_batch_end"]
    start = [f"on_{kind}_start", f"on_{kind}_epoch_start"]
    values = ["on_metrics"] if kind != "predict" else []
    end = [f"on_{kind}_epoch_end", *values, f"on_{kind}_end"]
    assert calls == ["setup", *start, *batch, *batch, *end, "teardown"]


def test_a_tasks_hooks_come_after_the_callbacks(tmp_path: Path) -> None:
    """Each hook is called on the callbacks in the order of the list, then on the Task."""
    calls: list[str] = []
    callbacks = [spy(Callback, TASK_HOOKS, calls, f"{place} ") for place in ("first", "second")]
    task = spy(Line, TASK_HOOKS, calls, "task ")
    quiet(tmp_path, num_sanity_val_steps=0, callbacks=callbacks).fit(task, loader(4), loader(4))
    groups = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    names = [group[0].removeprefix("first ") for group in groups]
    assert groups == [[f"first {name}", f"second {name}", f"task {name}"] for name in names]
    fit_hooks = [name for name in FIT if name in TASK_HOOKS]
    assert set(names) == set(fit_hooks)


def test_an_exception_is_announced_and_torn_down(tmp_path: Path) -> None:
    """A run that ends with an error calls on_exception and teardown,
    and neither on_train_end nor on_fit_end.
    """
    calls: list[str] = []

    class Broken(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        quiet(tmp_path, callbacks=spy(Callback, HOOKS, calls)).fit(Broken(), loader(4))
    assert calls[-3:] == ["on_train_batch_start", "on_exception", "teardown"]


def test_hooks_get_their_arguments(tmp_path: Path) -> None:
    """A batch hook receives trainer, task, the result of training_step,
    the batch and its number in the epoch.
    """
    seen: list[tuple[Any, ...]] = []

    class Watch(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(args)

    task, trainer = Line(), quiet(tmp_path, max_epochs=2, callbacks=Watch())
    trainer.fit(task, loader(8))
    assert [args[4] for args in seen] == [0, 1, 0, 1]
    assert seen[0][:2] == (trainer.run, task)
    assert seen[0][2].keys() == {"loss"} and not seen[0][2]["loss"].requires_grad
    assert [len(t) for t in seen[0][3]] == [4, 4]


def test_a_multi_optimizer_step_calls_its_hooks_for_each(tmp_path: Path) -> None:
    """Hooks before the update and before the gradients are dropped come once for each optimizer."""
    calls: list[str] = []

    class Two(Line):
        def configure_optimizers(self) -> Any:
            return [super().configure_optimizers(), super().configure_optimizers()]

    names = ["on_before_optimizer_step", "on_before_zero_grad"]
    quiet(tmp_path, max_steps=1, callbacks=spy(Callback, names, calls)).fit(Two(), loader(4))
    assert calls == [
        "on_before_zero_grad",
        "on_before_zero_grad",
        "on_before_optimizer_step",
        "on_before_optimizer_step",
    ]


def test_the_reference_lists_the_hooks_in_this_order() -> None:
    """docs/reference/hooks.md has the first epoch of the fit above, and how it ends."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "hooks.md").read_text()
    listed = [
        line.split()[0] for line in page.partition("```text\n")[2].partition("```")[0].splitlines()
    ]
    assert listed == FIT[: FIT.index("on_train_epoch_end") + 1] + FIT[FIT.index("on_train_end") :]


def test_an_epoch_keeps_its_number_in_its_last_hook(tmp_path: Path) -> None:
    """current_epoch moves after on_train_epoch_end,
    so that what a hook names by it has the epoch's own number.
    """
    seen: list[int] = []

    class Notes(Callback):
        def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
            seen.append(trainer.current_epoch)

    quiet(tmp_path, max_epochs=2, callbacks=[Notes()]).fit(Line(), loader(8))
    assert seen == [0, 1]
