"""What other libraries have set up around a fit is said where it begins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.threads import World
from tests.helpers.toy import Line, loader, quiet

ASKED = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_accelerate_launch_asks_for_is_named(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script trained in float32 with ddp under a config with bf16 and FSDP, in silence."""
    monkeypatch.setenv(asked, ASKED[asked])
    quiet(tmp_path, max_steps=1).fit(Line(), loader())
    lines = [line for line in capsys.readouterr().out.splitlines() if "accelerate's" in line]
    (line,) = lines
    assert "which only its Accelerator reads: " in line
    assert ". Set " in line


@pytest.mark.parametrize("accumulated", ["1", "2"])
def test_what_is_set_here_too_is_not(
    accumulated: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Equal settings, and those of accelerate's defaults."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # as its launcher writes it
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", accumulated)
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "auto")  # of DeepSpeed's own file
    settings = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    quiet(tmp_path, max_steps=1, **settings).fit(Line(), loader())
    assert "accelerate" not in capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 2])
def test_a_library_that_sees_one_rank_is_named(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """hvd.init() under torchrun, and Accelerator() under horovodrun: each rank is their rank 0."""
    horovod = SimpleNamespace(is_initialized=lambda: True, size=lambda: size)
    state: Any = type("PartialState", (), {"_shared_state": {"_cpu": True}, "num_processes": size})
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(PartialState=state))

    def work(engine: Any) -> None:
        quiet(tmp_path, engine=engine, max_steps=1).fit(Line(), loader())

    World(2).run(work)
    out = capsys.readouterr().out
    assert out.count("sees 1 rank, and this run has 2") == (2 if size == 1 else 0)


@pytest.mark.parametrize(("imported", "lines"), [("torch.distributed", 1), ("torch", 0)])
def test_a_loss_that_gathers_by_torch_without_a_group_is_named(
    imported: str,
    lines: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under horovodrun, lightly's gather_distributed=True would gather one rank's features."""
    theirs: Any = ModuleType("their_losses")
    theirs.dist = sys.modules[imported]
    theirs.Loss = type("Loss", (nn.Module,), {"__module__": theirs.__name__})
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)

    def work(engine: Any) -> None:
        task = Line()
        task.criterion = theirs.Loss()
        task.loaded = type("Loaded", (nn.Module,), {"__module__": "no_module"})()
        quiet(tmp_path, engine=engine, max_steps=1).fit(task, loader())

    World(2).run(work)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("torch.distributed sees 1 rank, and this run has 2") == lines
    assert out.count("Loss can use it, and it has no group (torchrun makes one)") == lines


@pytest.mark.parametrize(("scaling", "lines"), [("linear", 1), ("none", 0)])
def test_a_sum_beside_scaled_rates_is_named(
    scaling: Any, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gradient of N ranks' size and a rate times N: N squared, and the banner said each alone."""

    def work(engine: Any) -> None:
        engine.shown_options = {"op": "sum"}
        quiet(tmp_path, engine=engine, max_steps=1, lr_scaling=scaling).fit(Line(), loader())

    World(2).run(work)
    out = capsys.readouterr().out
    assert out.count("engine.op is 'sum', whose gradient has the size of all ranks'") == lines


@pytest.mark.parametrize(
    ("op", "kind", "settings", "clip", "named"),
    [
        ("adasum", torch.optim.SGD, {}, None, ""),
        ("adasum", torch.optim.SGD, {"momentum": 0.9}, None, "SGD with momentum or weight decay"),
        ("adasum", torch.optim.SGD, {"weight_decay": 0.1}, 0, "SGD with momentum or weight decay"),
        ("adasum", torch.optim.AdamW, {}, None, "AdamW"),
        ("adasum", torch.optim.SGD, {}, 1.0, "trainer.gradient_clip_val"),
        ("adasum", torch.optim.Adam, {}, 1.0, "Adam and trainer.gradient_clip_val"),
        ("sum", torch.optim.Adam, {}, 1.0, ""),
    ],
)
def test_adasum_of_what_is_no_plain_sgd_is_named(
    op: str,
    kind: Any,
    settings: dict[str, Any],
    clip: float | None,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Horovod's DistributedOptimizer combines the ranks' updates, and here gradients are combined:
    the weights differ, and nothing said so.
    """

    class Task(Line):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=0.01, **settings)

    def work(engine: Any) -> None:
        engine.shown_options = {"op": op}
        trainer = quiet(
            tmp_path, engine=engine, max_steps=1, lr_scaling="none", gradient_clip_val=clip
        )
        trainer.fit(Task(), loader())

    World(2).run(work)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("op=hvd.Adasum combines their updates") == bool(named)
    assert not named or f"with {named} the weights differ" in out
