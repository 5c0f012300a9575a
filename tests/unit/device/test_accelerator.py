"""What accelerators share, and what some lack: each is refused with a sentence, or done otherwise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.toy import Line, loader, quiet
from trainkit.checkpoint import stateful
from trainkit.device.accelerator import generators, has_streams, name_of, wide
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.engine.pinning import pin_device
from trainkit.errors import ConfigError
from trainkit.extensions.find.batch import _train
from trainkit.extensions.halving.oom import HalveOnOom
from trainkit.run.compile import Compile

MPS = torch.device("mps", 0)


def run_on(kind: str, **numerics: Any) -> Any:
    """Return as much of a run as a refusal reads."""
    return SimpleNamespace(
        engine=SimpleNamespace(device=torch.device(kind, 0)),
        options=SimpleNamespace(numerics=SimpleNamespace(**numerics)),
    )


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_an_accelerator_beside_cuda_is_taken_by_its_name(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch sees it; by "auto" it is not."""
    ranks: Any = SimpleNamespace(local_size=1)
    with pytest.raises(ConfigError, match=f"'{kind}', but torch sees no GPU here of this kind"):
        pin_device(kind, ranks)
    monkeypatch.setattr(torch.get_device_module(kind), "is_available", lambda: True)
    assert pin_device(kind, ranks) == torch.device(kind, 0)
    assert pin_device("auto", ranks) == torch.device("cpu")


@pytest.mark.parametrize("name", ["ddp", "horovod", "deepspeed"])
def test_ranks_have_no_sums_there(name: str) -> None:
    """Each engine but single refuses it before it starts."""
    engine: Any = SimpleNamespace(name=name, _requested_device="mps")
    with pytest.raises(ConfigError, match=f"'mps', and the engine is '{name}'.*Start one process"):
        Engine.pin(engine)


def test_lightnings_accelerator_is_the_device(tmp_path: Path) -> None:
    """accelerator="mps" is engine.device=mps."""
    engine: Any = quiet(tmp_path, accelerator="mps").options.engine
    assert engine._requested_device == "mps"


@pytest.mark.parametrize(
    ("name", "lack"), [("64-true", "lacks float64"), ("16-mixed", "the loss scale that float16")]
)
def test_precisions_that_mps_lacks_are_refused(name: Any, lack: str) -> None:
    """With what to take in their place."""
    with pytest.raises(ConfigError, match=f"'{name}'.*{lack}.* Use bf16-mixed or 32-true"):
        Precision(name, MPS)
    assert Precision("bf16-mixed", MPS).compute_dtype == torch.bfloat16


def test_cuda_graphs_are_refused_elsewhere() -> None:
    """torch would compile without them, and say nothing."""
    compiling = Compile("reduce-overhead", lambda _: None)
    with pytest.raises(ConfigError, match=r"replays CUDA graphs, .*'mps'. Use trainer.compile=t"):
        compiling.data_read(run_on("mps"))
    compiling.data_read(run_on("cuda", assert_no_sync=False))
    with pytest.raises(ConfigError, match="on 'xpu' the guard's interception"):
        Compile(True, lambda _: None).data_read(run_on("xpu", assert_no_sync=True))


def test_what_reads_memory_that_ran_out_is_refused_on_mps() -> None:
    """torch raises an error there that is like any other, and knows no peak."""
    with pytest.raises(ConfigError, match="torch does not say that memory ran out"):
        HalveOnOom().data_read(run_on("mps"))
    HalveOnOom().data_read(run_on("cuda"))
    with pytest.raises(ConfigError, match="find batch compares peaks"):
        _train(run_on("mps"), None)


def test_sums_are_wide_where_the_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64, but on mps, and on Intel's GPUs without it."""
    assert wide(torch.device("cpu")) == wide(torch.device("cuda", 0)) == torch.float64
    assert wide(MPS) == torch.float32 and not has_streams(MPS) and name_of(MPS) == "mps"
    for number, has_it in enumerate((True, False)):
        about = SimpleNamespace(has_fp64=has_it)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device, about=about: about)
        assert wide(torch.device("xpu", number)) == (torch.float64 if has_it else torch.float32)


class Narrow(TorchDispatchMode):
    """A device without float64: an operation that makes such a tensor fails, as on mps."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        assert not isinstance(made, Tensor) or made.dtype != torch.float64, func
        return made


class Weighing(Line):
    """Weighs its batches itself, and logs tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, and weights on the device."""
        loss = super().training_step(batch, batch_idx)
        self.log("train/own", loss.detach(), on_epoch=True)
        return {"loss": loss, "num_samples": torch.tensor(2.0)}


@pytest.mark.parametrize("has_it", [True, False])
def test_a_device_without_float64_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_it: bool
) -> None:
    """Weights of batches, logged values, a look at each loss and a validation: all in float32."""
    if not has_it:
        for module in ("metrics.log", "optim.sample_weights", "run.finite", "run.manual"):
            monkeypatch.setattr(f"trainkit.{module}.wide", lambda device: torch.float32)
    task = Weighing()
    trainer = quiet(tmp_path, max_epochs=2, accumulate_grad_batches=2, stop_on_nonfinite=True)
    with Narrow():
        if has_it:
            with pytest.raises(AssertionError, match="aten"):
                trainer.fit(task, loader(16), loader(8))
        else:
            trainer.fit(task, loader(16), loader(8))
            assert trainer.callback_metrics["train/own"] > 0


def test_random_numbers_of_other_accelerators_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch sees one; a state from elsewhere does not need to have them."""
    assert generators() == {} and "mps" not in stateful.random_state()
    drawn: list[Tensor] = [torch.arange(3)]
    kind = SimpleNamespace(get_rng_state=lambda: drawn[-1], set_rng_state=drawn.append)
    before = stateful.random_state()
    monkeypatch.setattr(stateful, "generators", lambda: {"mps": kind})
    state = stateful.random_state()
    assert state["mps"].tolist() == [0, 1, 2]
    stateful.set_random_state(before)
    assert len(drawn) == 1
    stateful.set_random_state(state)
    assert len(drawn) == 2
    with pytest.raises(TypeError, match="mps is int"):
        stateful.check_random_state(state | {"mps": 3})
