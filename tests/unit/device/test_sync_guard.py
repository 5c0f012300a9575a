"""assert_no_sync: the default step reads nothing off the device,
and a step that does is found with its line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.toy import Line, Net, loader, quiet
from trainkit.errors import ConfigError, SyncError

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.5},
    "clipping by value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"precision": "16-mixed"},
    "logging": {"log_every_n_steps": 1},
    "looking at losses": {"stop_on_nonfinite": True},
    "splitting": {"halve_batch_on_oom": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_our_own_step_reads_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The step of every setting passes, evaluation and logging beside it included."""
    quiet(tmp_path, max_epochs=2, assert_no_sync=True, **settings).fit(
        Net(momentum=0.9), loader(23), loader(5)
    )


OPTIMIZERS = [
    torch.optim.SGD,
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
def test_torchs_optimizers_read_nothing_but_their_own_counts(
    tmp_path: Path, optimizer: Any
) -> None:
    """Step counts of optimizers live on the CPU, also beside a GPU: reading them is no wait."""

    class Own(Line):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.01)

    quiet(tmp_path, assert_no_sync=True).fit(Own(), loader(8))


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "if": lambda t: bool(t.sum() > 0),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().numpy(),
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0),
    "mask": lambda t: t[t > 0],
    "masked_select": lambda t: t.masked_select(t > 0),
    "unique": lambda t: t.unique(),
    "equal": lambda t: torch.equal(t, t),
    "isnan any": lambda t: "nan" if t.isnan().any() else "fine",
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_is_found_with_its_line(tmp_path: Path, read: Callable[[Tensor], Any]) -> None:
    """Each way to read a value ends the run and names file and line."""

    class Reads(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            read(batch[0])
            return super().training_step(batch, batch_idx)

    with pytest.raises(
        SyncError, match=rf"off the device, at .*{Path(__file__).name}:\d+\. On a GPU"
    ):
        quiet(tmp_path, assert_no_sync=True).fit(Reads(), loader(8))
    quiet(tmp_path).fit(Reads(), loader(8))  # off by default


def test_a_read_in_backward_and_in_a_hook_is_found(tmp_path: Path) -> None:
    """Code outside of training_step is checked too."""

    class InHook(Line):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            float(next(iter(self.parameters())).grad.norm())  # type: ignore[union-attr]

    class InBackward(Line):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda grad: grad.sum().item() * 0 + grad)
            return y

    for task in (InHook(), InBackward()):
        with pytest.raises(SyncError):
            quiet(tmp_path, assert_no_sync=True).fit(task, loader(8))


def test_validation_and_data_may_read(tmp_path: Path) -> None:
    """Code outside a step may read."""

    class Reads(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", batch[0].sum().item())

    def collate(samples: list[Any]) -> Any:
        assert samples[0][0].sum().item() is not None
        return torch.utils.data.default_collate(samples)

    quiet(tmp_path, assert_no_sync=True).fit(Reads(), loader(8, collate_fn=collate), loader(4))


def test_watching_reads_and_compiling_are_two_runs(tmp_path: Path) -> None:
    """On the CPU the one keeps the other from happening, which is said."""
    with pytest.raises(ConfigError, match=r"assert_no_sync and trainer\.compile are both set"):
        quiet(tmp_path, assert_no_sync=True, compile=True).fit(Line(), loader(4))
