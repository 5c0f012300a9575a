"""A Task's own configure_gradient_clipping: before each update, with the gradients of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError, TaskError
from trainkit.loggers import CSVLogger


class Clipping(Line):
    """Clips by torch's function, and logs the norm."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **more: Any) -> None:
        """See Task."""
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))


def ends(task: Line, run_dir: Path, **settings: Any) -> list[torch.Tensor]:
    """Train; return the weights."""
    quiet(run_dir, max_epochs=2, **settings).fit(task, loader(16))
    return [p.detach().clone() for p in task.parameters()]


def test_it_clips_in_the_trainers_place(tmp_path: Path) -> None:
    """As gradient_clip_val does, with the norm before as a value of the step."""
    settings = {"accumulate_grad_batches": 2, "log_every_n_steps": 1}
    own = ends(Clipping(), tmp_path / "own", logger=CSVLogger(), **settings)
    same = ends(Line(), tmp_path / "same", gradient_clip_val=0.1, **settings)
    free = ends(Line(), tmp_path / "free", **settings)
    assert all(map(torch.equal, own, same))
    assert not all(map(torch.equal, own, free))
    head, *rows = (tmp_path / "own" / "metrics.csv").read_text().splitlines()
    place = head.split(",").index("norm")
    assert len([row for row in rows if row.split(",")[place]]) == 4


def test_it_has_lightnings_keywords_and_0_clips_nothing(tmp_path: Path) -> None:
    """Whatever the order of its arguments."""

    class Own(Line):
        def configure_gradient_clipping(
            self, optimizer: Any, *, gradient_clip_algorithm: str, gradient_clip_val: float
        ) -> None:
            """See Task."""
            assert (gradient_clip_algorithm, gradient_clip_val) == ("value", 0.1)
            self.clip_gradients(optimizer, 0)

    own = ends(Own(), tmp_path / "own", gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert all(map(torch.equal, own, ends(Line(), tmp_path / "free")))


def test_an_error_in_it_leaves_a_checkpoint(tmp_path: Path) -> None:
    """No weight has changed by then."""

    class Failing(Line):
        def configure_gradient_clipping(self, *args: Any, **more: Any) -> None:
            """Fail at the third update."""
            if self.global_step == 2:
                raise ValueError("a mistake of the user")

    saves = {"callbacks": [ModelCheckpoint(save_on_exception=True)], "enable_checkpointing": True}
    with pytest.raises(ValueError, match="a mistake"):
        quiet(tmp_path, max_epochs=1, **saves).fit(Failing(), loader(16))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert any("step=2" in name for name in names), names


@pytest.mark.parametrize("optimizers", [1, 2])
def test_clip_gradients_takes_the_trainers_settings(tmp_path: Path, optimizers: int) -> None:
    """Those that are left out; each optimizer is clipped."""

    class Own(Line):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **more: Any) -> None:
            """See Task."""
            self.clip_gradients(optimizer)

        def configure_optimizers(self) -> Any:
            """Return one for each parameter, or one for both."""
            every = list(self.parameters())
            groups = [every] if optimizers == 1 else [[p] for p in every]
            return [torch.optim.SGD(group, lr=0.1) for group in groups]

    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    own = ends(Own(), tmp_path / "own", **settings)
    assert all(map(torch.equal, own, ends(Line(lr=0.1), tmp_path / "same", **settings)))


def test_it_is_refused_where_nothing_calls_it(tmp_path: Path) -> None:
    """Under manual optimization, as in Lightning it would be left out in silence."""
    task = Clipping()
    task.automatic_optimization = False
    with pytest.raises(ConfigError, match="configure_gradient_clipping needs automatic"):
        quiet(tmp_path, max_steps=1).fit(task, loader(8))


def test_clip_gradients_elsewhere_is_refused(tmp_path: Path) -> None:
    """Where the gradients are one rank's; and another algorithm."""

    class Early(Line):
        def on_after_backward(self) -> None:
            """See Task."""
            self.clip_gradients(self.trainer.optimizers[0], 0.1)

    class Odd(Line):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **more: Any) -> None:
            """See Task."""
            self.clip_gradients(optimizer, 0.1, gradient_clip_algorithm="l2")

    with pytest.raises(TaskError, match="False in Early.__init__. Or call it in configure_grad"):
        quiet(tmp_path / "early", max_steps=1).fit(Early(), loader(8))
    with pytest.raises(TaskError, match="'l2'.*it must be 'norm' or 'value'"):
        quiet(tmp_path / "odd", max_steps=1).fit(Odd(), loader(8))
