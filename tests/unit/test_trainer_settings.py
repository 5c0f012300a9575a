"""Settings of the Trainer that change how a run computes:
compile, overfitting, anomalies, accumulation by epoch, resuming.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.toy import Line, Net, Recorder, compile_with, loader, quiet, rows, weights
from trainkit.callbacks import ModelCheckpoint
from trainkit.callbacks.banner import lacks_tensor_cores
from trainkit.errors import ConfigError


def test_compiled_is_the_same_run(tmp_path: Path) -> None:
    """A compiled model trains to the same weights; a checkpoint's keys are the plain ones;
    the task is left as it was.
    """
    plain, fast = Net(), Net()
    plain.model[3].p = fast.model[3].p = 0.0  # dropout draws otherwise when compiled
    calls: list[bool] = []

    class Look(Recorder):
        def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
            calls.append(task.model._compiled_call_impl is not None)

    quiet(tmp_path / "plain").fit(plain, loader(23), loader(5))
    quiet(tmp_path / "fast", compile=True, callbacks=[ModelCheckpoint(), Look()]).fit(
        fast, loader(23), loader(5)
    )
    torch.testing.assert_close(weights(fast), weights(plain), rtol=1e-4, atol=1e-5)
    assert set(load_file(tmp_path / "fast/checkpoints/last/weights.safetensors")) == set(
        Net().state_dict()
    )
    assert calls and all(calls)
    assert fast.model._compiled_call_impl is None


@pytest.mark.parametrize(
    ("mode", "moves"), [("reduce-overhead", True), ("max-autotune", True), ("default", False)]
)
def test_gradients_stay_where_graphs_are_replayed(
    mode: str, moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a step's first microbatch leave the memory into which CUDA
    graphs write the second one's; the sum stays.
    """
    compile_with(monkeypatch, "eager")
    left: list[int] = []
    begun: list[int] = []

    class Look(Recorder):
        def on_after_backward(self, trainer: Any, task: Any) -> None:
            left.append(task.model.weight.grad.data_ptr())

        def on_before_backward(self, trainer: Any, task: Any, loss: Any) -> None:
            begun.append(0 if task.model.weight.grad is None else task.model.weight.grad.data_ptr())

    plain, fast = Line(), Line()
    quiet(tmp_path / "plain", accumulate_grad_batches=2).fit(plain, loader(16))
    quiet(tmp_path / "fast", accumulate_grad_batches=2, compile=mode, callbacks=Look()).fit(
        fast, loader(16)
    )
    assert torch.equal(weights(fast), weights(plain))
    assert len(begun) == 4
    assert begun[::2] == [0, 0]
    assert [after != before for before, after in zip(left[::2], begun[1::2], strict=True)] == [
        moves,
        moves,
    ]


def test_compile_needs_a_module(tmp_path: Path) -> None:
    """A task with weights as its own attributes has nothing to compile, and raises;
    a mode must be torch's.
    """

    class Bare(Line):
        def __init__(self) -> None:
            super().__init__()
            del self.model
            self.weight = nn.Parameter(torch.zeros(3, 1))

    with pytest.raises(
        ConfigError, match=r"trainer\.compile is True, but Bare has no module with weights"
    ):
        quiet(tmp_path, compile=True).fit(Bare(), loader(4))
    with pytest.raises(
        ConfigError,
        match=r"trainer\.compile is 'fast'; it must be true or false or one of 'default'",
    ):
        quiet(tmp_path, compile="fast")


@pytest.mark.parametrize(("share", "count"), [(2, 8), (0.5, 11)])
def test_overfitting_takes_the_same_batches_again(tmp_path: Path, share: float, count: int) -> None:
    """overfit_batches trains each epoch on the first samples, unshuffled,
    and validates on as many.
    """
    seen: list[list[float]] = []
    validated: list[int] = []

    class Keep(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated.append(len(batch[0]))

    settings = {"overfit_batches": share, "max_epochs": 2, "num_sanity_val_steps": 0}
    quiet(tmp_path, **settings).fit(Keep(), loader(23, shuffle=True), loader(23))
    flat = sum(seen, [])
    assert flat[:count] == flat[count:] == rows(23).tensors[0][:count, 0].tolist()
    assert sum(validated) == 2 * count


def test_switches_hold_for_the_run_alone(tmp_path: Path) -> None:
    """benchmark, detect_anomaly and float32_matmul_precision hold while the run lasts, and are as
    before afterwards.
    """
    seen: list[tuple[bool, bool, str]] = []

    def look() -> tuple[bool, bool, str]:
        matmul = torch.get_float32_matmul_precision()
        return torch.backends.cudnn.benchmark, torch.is_anomaly_enabled(), matmul

    class Look(Line):
        def on_train_start(self) -> None:
            seen.append(look())

    switches = {"benchmark": True, "detect_anomaly": True, "float32_matmul_precision": "high"}
    quiet(tmp_path, **switches).fit(Look(), loader(4))
    quiet(tmp_path).fit(Look(), loader(4))
    assert seen == [(True, True, "high"), (False, False, "highest")]
    assert look() == (False, False, "highest")


def test_products_of_float32_that_there_are_none_of(tmp_path: Path) -> None:
    """float32_matmul_precision is refused where all is float64."""
    with pytest.raises(
        ConfigError, match="float32_matmul_precision is 'high', and .* is '64-true'"
    ):
        quiet(tmp_path, precision="64-true", float32_matmul_precision="high")


@pytest.mark.parametrize(
    ("device", "capability", "settings", "is_shown"),
    [
        ("cuda", (9, 0), {}, True),
        ("cuda", (7, 0), {}, False),
        ("cuda", (9, 0), {"precision": "bf16-mixed"}, False),
        ("cuda", (9, 0), {"float32_matmul_precision": "high"}, False),
        ("cpu", (9, 0), {}, False),
    ],
)
def test_a_gpu_whose_tensor_cores_rest_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    settings: dict[str, Any],
    is_shown: bool,
) -> None:
    """The banner's advice, for float32 on a GPU that could multiply it rounded to TF32."""
    shown: list[bool] = []

    class Look(Line):
        def on_train_start(self) -> None:
            pretended = SimpleNamespace(device=torch.device(device))
            run = SimpleNamespace(engine=pretended, options=self.trainer.options)
            shown.append(lacks_tensor_cores(run))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    quiet(tmp_path, **settings).fit(Look(), loader(4))
    assert shown == [is_shown]


def test_detect_anomaly_names_the_operation(tmp_path: Path) -> None:
    """The error of a backward that gives NaN names the forward operation."""

    class Root(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self(batch[0]) * 0).sqrt().sum() * 0

    with pytest.raises(RuntimeError, match="SqrtBackward0.*nan"):
        quiet(tmp_path, detect_anomaly=True).fit(Root(), loader(4))


def test_accumulation_by_epoch(tmp_path: Path) -> None:
    """Steps, samples and rates follow the epoch's accumulation;
    the factor is that of the epoch's global batch.
    """
    rates = Recorder()
    run = quiet(
        tmp_path,
        max_epochs=3,
        accumulate_grad_batches={0: 2, 1: 1},
        lr_reference_batch_size=4,
        callbacks=rates,
    )
    run.fit(Line(), loader(24))
    assert rates.lrs == pytest.approx([0.2] * 3 + [0.1] * 12)
    assert (run.global_step, run.state.samples_seen, run.estimated_stepping_batches) == (15, 72, 15)


def test_accumulation_by_epoch_resumes_inside_an_epoch(tmp_path: Path) -> None:
    """A stopped run with accumulation by epoch resumes to the same bits."""
    settings = {
        "max_epochs": 4,
        "accumulate_grad_batches": {0: 1, 2: 3},
        "lr_reference_batch_size": 4,
    }
    whole, parts = Net(momentum=0.9), Net(momentum=0.9)
    quiet(tmp_path / "whole", **settings).fit(whole, loader(24, shuffle=True))
    keep = ModelCheckpoint()
    quiet(tmp_path / "parts", **settings, max_steps=13, callbacks=keep).fit(
        Net(momentum=0.9), loader(24, shuffle=True)
    )
    quiet(tmp_path / "parts", **settings).fit(parts, loader(24, shuffle=True), ckpt_path="last")
    assert torch.equal(weights(parts), weights(whole))


def uncorrected(lrs: list[float], momentum: float) -> Tensor:
    """Return the weights of a loop with v = m v + lr g,
    as in frameworks that need momentum correction.
    """
    task = Line().double()
    x_NI, y_NO = (t.double() for t in rows(24).tensors)
    velocity = [torch.zeros_like(p) for p in task.parameters()]
    for step, lr in enumerate(lrs):
        task.zero_grad()
        batch = slice(4 * step, 4 * step + 4)
        nn.functional.mse_loss(task(x_NI[batch]), y_NO[batch]).backward()
        for parameter, v in zip(task.parameters(), velocity, strict=True):
            v.mul_(momentum).add_(parameter.grad, alpha=lr)  # type: ignore[arg-type]
            parameter.data -= v
    return weights(task)


def test_momentum_without_correction(tmp_path: Path) -> None:
    """lr_momentum_correction=false gives the other form of momentum while the rate warms up;
    true gives torch's.
    """
    settings = {"lr_warmup_steps": 5, "precision": "64-true"}
    rates = Recorder()
    task, corrected, plain = Line(momentum=0.9), Line(momentum=0.9), Line(momentum=0.9).double()
    quiet(tmp_path, **settings, lr_momentum_correction=False, callbacks=rates).fit(task, loader(24))
    torch.testing.assert_close(weights(task), uncorrected(rates.lrs, 0.9), rtol=0, atol=1e-12)
    quiet(tmp_path, **settings).fit(corrected, loader(24))
    optimizer = plain.configure_optimizers()
    for lr, batch in zip(rates.lrs, loader(24), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        plain.log = lambda *_: None  # type: ignore[assignment, method-assign]
        plain.training_step([t.double() for t in batch], 0).backward()
        optimizer.step()
    torch.testing.assert_close(weights(corrected), weights(plain), rtol=0, atol=1e-12)
    assert not torch.allclose(weights(corrected), weights(task))


def test_momentum_without_correction_resumes(tmp_path: Path) -> None:
    """The last rate is saved over a restart."""
    settings = {"lr_warmup_steps": 5, "lr_momentum_correction": False}
    whole, parts = Line(momentum=0.9), Line(momentum=0.9)
    quiet(tmp_path / "whole", **settings).fit(whole, loader(24))
    quiet(tmp_path / "parts", **settings, max_steps=3, callbacks=ModelCheckpoint()).fit(
        Line(momentum=0.9), loader(24)
    )
    quiet(tmp_path / "parts", **settings).fit(parts, loader(24), ckpt_path="last")
    assert torch.equal(weights(parts), weights(whole))


def test_momentum_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Without momentum, or if a scheduler moves it, the setting is refused."""

    class Cycle(Line):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)]

    for task, why in (
        (Line(), "no optimizer has a momentum"),
        (Cycle(momentum=0.9), r"a scheduler moves .*cycle_momentum"),
    ):
        with pytest.raises(
            ConfigError, match=rf"trainer\.lr_momentum_correction is false, but {why}"
        ):
            quiet(tmp_path, lr_momentum_correction=False).fit(task, loader(4))


def test_another_contract_is_reported_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changes since the checkpoint are reported;
    inside an epoch no sample is left out or repeated.
    """
    seen: list[float] = []

    class Keep(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    quiet(tmp_path, max_steps=3, accumulate_grad_batches=2, callbacks=ModelCheckpoint()).fit(
        Line(), loader(32)
    )
    quiet(tmp_path).fit(Keep(), loader(32), ckpt_path="last")
    said = capsys.readouterr().out
    changes = (
        "accumulate_grad_batches was 2, is 1; global_batch_size was 8, is 4; step 6 of the epoch"
        " comes next, 0 samples"
    )
    assert f"Changed since the checkpoint: {changes}" in said
    assert seen == rows(32).tensors[0][24:, 0].tolist()
    quiet(tmp_path).fit(Line(), loader(32, batch_size=5), ckpt_path="last")
    assert (
        "step 4 of the epoch comes next, 4 samples of it for the second time"
        in capsys.readouterr().out
    )
    quiet(tmp_path, accumulate_grad_batches=2).fit(Line(), loader(32), ckpt_path="last")
    assert "Other than" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"lr_scaling": "none", "lr_reference_batch_size": 256},
            "_batch_size is 256, but trainer.lr_scaling is 'none'",
        ),
        (
            {"gradient_clip_algorithm": "value"},
            "gradient_clip_algorithm is 'value', but trainer.gradient_clip_val is not set",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    """It never passes in silence."""
    with pytest.raises(ConfigError, match=says):
        quiet(tmp_path, **settings)


@pytest.mark.parametrize(
    ("channels_last", "device", "laid_out"),
    [("auto", "cpu", False), ("auto", "cuda", True), (True, "cpu", True)],
)
def test_channels_last_is_for_gpus_where_it_is_left_to_trainkit(
    channels_last: Any, device: str, laid_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` uses the layout on a GPU, where it is faster; true uses it anywhere."""

    class Image(Line):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            run = self.trainer
            layouts.append(
                (
                    run.options.numerics.uses_channels_last(run.engine.device),
                    batch[0].is_contiguous(memory_format=torch.channels_last),
                )
            )
            # a stand-in: only its type is asked for
            monkeypatch.setattr(run.engine, "device", torch.device(device))
            layouts.append(run.options.numerics.uses_channels_last(run.engine.device))
            monkeypatch.undo()
            return super().training_step((batch[0].flatten(1)[:, :3], batch[1]), batch_idx)

    layouts: list[Any] = []
    data = DataLoader(TensorDataset(torch.ones(4, 3, 2, 2), torch.ones(4, 1)), 4)
    quiet(tmp_path, max_steps=1, channels_last=channels_last).fit(Image(), data)
    here = channels_last is True
    assert layouts == [(here, here), laid_out]


def test_overfitting_beside_limits_is_refused(tmp_path: Path) -> None:
    """Two answers to one question are refused by the key that was written."""
    with pytest.raises(ConfigError, match=r"trainer\.overfit_batches is "):
        quiet(tmp_path, overfit_batches=2, limit_val_batches=0)
