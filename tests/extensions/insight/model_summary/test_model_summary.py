"""ModelSummary: layers with shapes, parameters and FLOPs, and a run that stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.toy import Line, Net, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import ModelSummary
from trainkit.errors import ConfigError
from trainkit.extensions.insight.model_summary.model_summary import short_number


def run(tmp_path: Path, task: Any, summary: ModelSummary, **settings: Any) -> None:
    """Train one step of 4 samples."""
    quiet(tmp_path, callbacks=summary, max_steps=1, **settings).fit(task, loader(8))


def rows(out: str) -> dict[str, list[str]]:
    """Return the table's cells by the layer's name."""
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}


def test_layers_are_shown_with_their_shapes_and_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first batch's shapes, parameters, and FLOPs of one sample,
    down to the requested depth.
    """
    run(tmp_path, Net(), ModelSummary(max_depth=2))
    out = capsys.readouterr().out
    table = rows(out)
    assert list(table) == ["layer", "model", *(f"model.{i}" for i in range(5)), "Net:"]
    assert table["model"] == ["Sequential", "4x3", "4x1", "57", "57", "64"]
    assert table["model.0"] == ["Linear", "4x3", "4x8", "32", "32", "48"]
    assert table["model.3"] == ["Dropout", "4x8", "4x8", "0", "0", "-"]
    assert (
        "Net: parameters 57, 57 trainable; 300 B with buffers; forward of a sample: 64 FLOPs" in out
    )
    assert max(map(len, out.splitlines())) <= 120


def test_by_default_only_the_first_level_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """max_depth=1 shows the Task's own modules, -1 all."""
    run(tmp_path, Net(), ModelSummary())
    assert list(rows(capsys.readouterr().out)) == ["layer", "model", "Net:"]
    run(tmp_path, Net(), ModelSummary(-1))
    assert "model.4" in rows(capsys.readouterr().out)


class Several(Line):
    """A forward with two arguments, an example for them, a frozen layer, and a direct parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(2))
        self.example_input_array = (torch.zeros(2, 3), torch.zeros(2, 3))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the model's answer."""
        if other is not None:
            x = x + self.frozen(other)
        return self.model(x) * self.scale.mean()


def test_an_example_of_the_task_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """example_input_array is a tuple of arguments;
    frozen parameters and the Task's direct ones are counted separately.
    """
    run(tmp_path, Several(), ModelSummary())
    out = capsys.readouterr().out
    table = rows(out)
    assert table["frozen"] == ["Linear", "2x3", "2x3", "12", "0", "18"]
    assert "(its own)  Several" in out and "parameters 18, 6 trainable" in out


def test_a_forward_that_cannot_be_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the table has no shapes, the reason is printed below it, and training continues."""

    class NoForward(Line):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("only with targets")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(batch[0]).sum()

    run(tmp_path, NoForward(), ModelSummary())
    out = capsys.readouterr().out
    assert rows(out)["model"] == ["Linear", "4", "4"]
    assert (
        "No shapes: NoForward.forward failed on Tensor [4, 3] (ValueError: only with targets)."
        in out
    )


class Ends(Callback):
    """Records weights, buffers and random states after each step."""

    def __init__(self) -> None:
        self.kept: list[list[Tensor]] = []

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Keep them."""
        self.kept.append(
            [weights(task), *(b.clone() for b in task.buffers()), torch.get_rng_state()]
        )


class Counts(Net):
    """Changes a buffer and draws random numbers in each forward, in eval mode too,
    and freezes its norm.
    """

    def __init__(self, example: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        if example:
            self.example_input_array = torch.zeros(5, 3)

    def on_train_start(self) -> None:
        """Freeze the norm."""
        self.model[1].eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's answer."""
        self.calls += torch.rand(1)
        return self.model(x)


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}, {"assert_no_sync": True}])
def test_a_summary_changes_nothing(tmp_path: Path, example: bool, settings: dict[str, Any]) -> None:
    """Weights, buffers, modes and random states of each step equal
    those of a run without a summary, bit for bit.
    """
    summed, plain, task = Ends(), Ends(), Counts(example)
    quiet(tmp_path, callbacks=[ModelSummary(-1), summed], **settings).fit(task, loader(16))
    quiet(tmp_path, callbacks=[plain], precision=settings.get("precision", "32-true")).fit(
        Counts(example), loader(16)
    )
    assert len(summed.kept) == 4
    assert all(
        torch.equal(a, b)
        for one, other in zip(summed.kept, plain.kept, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in task.modules())


@pytest.mark.parametrize("depth", [0, -2])
def test_an_illegal_depth_is_refused(depth: int) -> None:
    """A depth of 0 is refused."""
    with pytest.raises(
        ConfigError,
        match=rf"callbacks\.model_summary\.max_depth is {depth}; it must be 1 or more, or -1",
    ):
        ModelSummary(depth)


def test_numbers_are_written_short() -> None:
    """Numbers have three digits and a prefix."""
    assert [short_number(n) for n in (0, 999, 1500, 2.5e6, 4e9, 1.23e12)] == [
        "0 ",
        "999 ",
        "1.5 k",
        "2.5 M",
        "4 G",
        "1.23 T",
    ]
