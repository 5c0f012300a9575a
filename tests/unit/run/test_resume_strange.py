"""A checkpoint with right hashes, and with content that no run could have written,
is passed over as a damaged one is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.format import Snapshot, load_training, read_state
from trainkit.checkpoint.store import LocalStore
from trainkit.errors import CheckpointError
from trainkit.run.saved import difference

Saved = dict[str, Any]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """The store of a run of two steps with a checkpoint of each."""
    run_dir = tmp_path_factory.mktemp("run")
    fit(run_dir, 2)
    return LocalStore(run_dir / "checkpoints")


def fit(run_dir: Path, max_steps: int, ckpt_path: str | None = None) -> Any:
    """Train; return the trainer."""
    policy = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    trainer = quiet(run_dir, max_steps=max_steps, enable_checkpointing=True, callbacks=policy)
    trainer.fit(Line(momentum=0.9), loader(), loader(5), ckpt_path=ckpt_path)
    return trainer


def with_newest(before: LocalStore, run_dir: Path, training: Any) -> LocalStore:
    """Return a copy of the store, with another state beside the newest checkpoint's weights."""
    store = LocalStore(run_dir / "checkpoints")
    for name in before.names():
        folder = before.folder / name
        own = load_training(folder)
        content = training(own) if own["state"]["global_step"] == 2 else own
        store.write(name, Snapshot(read_state(folder), {}, content, {}))
    return store


def put(place: str, value: Any) -> Callable[[Saved], Saved]:
    """Return a function that replaces what is at a place, as a/b, of a saved state;
    `...` removes it.
    """

    def change(saved: Saved) -> Saved:
        *outer, last = [int(key) if key.isdigit() else key for key in place.split("/")]
        tree: Any = saved
        for key in outer:
            tree = tree[key]
        if value is ...:
            del tree[last]
        else:
            tree[last] = value
        return saved

    return change


STRANGE: dict[str, tuple[Callable[[Saved], Any], str]] = {
    "a list": (lambda saved: [saved], "it is of type list, not a mapping"),
    "a number": (lambda saved: 7, "it is of type int, not a mapping"),
    "no optimizers": (put("optimizers", ...), "'optimizers' is missing"),
    "optimizers of another type": (
        put("optimizers", {"adam": 1}),
        "'optimizers' is of type dict, not a list",
    ),
    "an optimizer of another type": (
        put("optimizers/0", "sgd"),
        "'optimizers/0' is of type str, not a mapping",
    ),
    "no groups": (put("optimizers/0/param_groups", ...), "'optimizers/0/param_groups' is missing"),
    "a counter as text": (
        put("state/global_step", "2"),
        "'state/global_step' is of type str, not int",
    ),
    "a counter that older ones lack": (
        put("state/loop_steps", "2"),
        "'state/loop_steps' is of type str, not int",
    ),
    "a counter less": (put("state/current_epoch", ...), "'state/current_epoch' is missing"),
    "other random numbers": (
        put("random/0/torch", torch.zeros(3)),
        "'random/0' is no state of random numbers",
    ),
    "random numbers of no rank": (put("random", []), "'random' is empty"),
    "another plan": (put("contract/batch_sizes", 4), "'contract' has batch_sizes"),
    "a plan without ranks": (put("contract/world_size", ...), "'contract/world_size' is missing"),
    "rates of another type": (put("rates", 0.1), "'rates' is of type float, not a mapping"),
    "values of another type": (
        put("values/metrics", [1.0]),
        "'values/metrics' is of type list, not a mapping",
    ),
    "no means": (put("metrics/0/log", ...), "'metrics/0/log' is missing"),
    "no count of validations": (
        put("validations", None),
        "'validations' is of type NoneType, not int",
    ),
    "callbacks of another type": (
        put("callbacks", []),
        "'callbacks' is of type list, not a mapping",
    ),
    "what hooks added as text": (put("extra", ""), "'extra' is of type str, not a mapping"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_strange_is_named(before: LocalStore, name: str) -> None:
    """The comparison names the place, and what is there in the place of what a run saves."""
    change, reason = STRANGE[name]
    saved = load_training(before.folder / "epoch=0-step=2")
    assert difference(saved) == ""
    assert difference(change(saved)).startswith(reason)


def test_the_checkpoint_before_a_strange_one_is_taken(
    before: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` resumes from the checkpoint before it, and prints what is strange."""
    store = with_newest(before, tmp_path, put("optimizers", ...))
    trainer = fit(tmp_path, 3, "auto")
    assert (
        trainer.run.checkpoints.resumed_from == store.path_of("epoch=0-step=1")
        and trainer.global_step == 3
    )
    said = " ".join(capsys.readouterr().out.split())
    newest = store.path_of("epoch=0-step=2")
    assert (
        f"{newest} cannot be resumed from: in its training.pt 'optimizers' is missing. The one"
        " before it is taken." in said
    )


def test_a_whole_state_is_taken(before: LocalStore, tmp_path: Path) -> None:
    """The newest checkpoint is taken if nothing in it was changed:
    the comparison refuses nothing that a run writes.
    """
    store = with_newest(before, tmp_path, lambda saved: saved)
    assert fit(tmp_path, 3, "auto").run.checkpoints.resumed_from == store.path_of("epoch=0-step=2")


def test_a_state_without_the_number_of_batches_is_taken(before: LocalStore, tmp_path: Path) -> None:
    """Older checkpoints do not have it: the run counts on from the number of updates."""
    store = with_newest(before, tmp_path, put("state/loop_steps", ...))
    trainer = fit(tmp_path, 3, "auto")
    assert trainer.run.checkpoints.resumed_from == store.path_of("epoch=0-step=2")
    assert trainer.state.loop_steps == 3


def test_a_strange_state_that_was_requested_is_refused(before: LocalStore, tmp_path: Path) -> None:
    """A checkpoint that was requested by its path is refused in words; no other is taken."""
    store = with_newest(before, tmp_path, put("optimizers", ...))
    with pytest.raises(
        CheckpointError,
        match=r"in its training\.pt 'optimizers' is missing\. Take another one: ckpt_path=PATH",
    ):
        fit(tmp_path, 3, store.path_of("epoch=0-step=2"))
