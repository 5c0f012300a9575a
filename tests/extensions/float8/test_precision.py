"""trainer.precision=fp8-mixed, with float8 imitated on the CPU: the products by a formula of its own,
the same weights for any microbatches, what it leaves alone and what it refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.device.precision import Precision, precision_of
from trainkit.errors import ConfigError
from trainkit.extensions.float8.precision import Float8Precision

pytest.importorskip("torchao", reason="needs torchao, from the extra fp8")

E4M3_MAX = 448.0


@pytest.fixture(autouse=True)
def _imitated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Float8Precision, "imitates", True)


class Wide(nn.Module):
    """Rows of 3 numbers through two layers that can multiply in float8, one of sizes that cannot,
    and a head that is tied to the second.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(3, 16)
        self.first, self.second, self.again = (
            nn.Linear(16, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )
        self.again.weight = self.second.weight
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number a row."""
        return self.last(self.again(torch.tanh(self.first(torch.tanh(self.spread(x))))))


class Deep(Line):
    """The model as a Task, with torch's first weights."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        torch.manual_seed(3)
        self.model = Wide()


def _float8(rows: Tensor) -> Tensor:
    """Return rows rounded to float8, each by its own scale, as float32 again."""
    scale = (E4M3_MAX / rows.abs().amax(dim=1, keepdim=True)).log2().floor().exp2()
    return (rows * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() / scale


def _converted(model: nn.Module) -> Precision:
    precision = precision_of("fp8-mixed", torch.device("cpu"))
    precision.convert(model)
    return precision


def test_products_are_those_of_rounded_rows():
    """Forward multiplies rows of inputs with rows of weights, and backward rows of gradients with
    columns of weights, all rounded to float8; the weight's gradient is not rounded.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48, bias=False)), torch.randn(7, 32, requires_grad=True)
    weight = model[0].weight
    _converted(model)
    out = model(x)
    out.backward(gradient := torch.randn(7, 48))
    assert torch.allclose(out, _float8(x.detach()) @ _float8(weight.detach()).T, atol=1e-6)
    assert not torch.allclose(out, x @ weight.T, atol=1e-2)
    assert x.grad is not None
    by_hand = _float8(gradient) @ _float8(weight.detach().T.contiguous()).T
    assert torch.allclose(x.grad, by_hand, atol=1e-6)
    assert weight.grad is not None
    assert torch.allclose(weight.grad, gradient.T @ x.detach(), atol=1e-5)


def test_layers_that_it_leaves_alone_are_named():
    """Sizes that are no multiples of 16, a weight of two modules, and hooks; Parameters stay."""
    model = Wide()
    before = dict(model.named_parameters(remove_duplicate=False))
    precision = _converted(model)
    converted = [
        name for name, module in model.named_modules() if "Float8" in type(module).__name__
    ]
    assert converted == ["first"]
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert precision.note == (
        "1 of 5 linear layers in float8; not spread (3 x 16), second (its weight is another module's"
        " too), again (its weight is another module's too), ..."
    )
    hooked = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    hooked[0].register_forward_hook(lambda *_: None)
    assert _converted(hooked).note == "1 of 2 linear layers in float8; not 0 (it has hooks)"


def test_a_second_time_nothing_is_changed():
    """A fit after a fit, or the next attempt of an elastic one, meets layers that are converted."""
    model = nn.Sequential(nn.Linear(16, 16))
    _converted(model)
    layer = model[0]
    assert _converted(model).note == "1 of 1 linear layers in float8"
    assert model[0] is layer
    assert len(layer._forward_pre_hooks) == 1


def _fit(folder: Path, **settings: Any) -> dict[str, Tensor]:
    task = Deep()
    options = {"precision": "fp8-mixed"} | settings
    quiet(folder, lr_scaling="none", **options).fit(task, loader(32, batch_size=8))
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


def test_a_row_does_not_depend_on_the_rows_beside_it():
    """The rows of a batch by themselves, as on other ranks, give the batch's answers and gradient,
    though one of them is a hundred times as large; one scale for all rows would not.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), torch.randn(6, 32)
    x[5] *= 100
    _converted(model)
    together = model(x)
    together.square().sum().backward()
    gradient = model[0].weight.grad
    model.zero_grad()
    apart = [model(row) for row in x.split(1)]
    torch.cat(apart).square().sum().backward()
    assert torch.equal(torch.cat(apart), together)
    assert gradient is not None
    assert torch.allclose(model[0].weight.grad, gradient, rtol=1e-5)


def test_checkpoints_are_those_of_other_precisions(tmp_path: Path):
    """A run in float8 is resumed bit for bit, and in bf16-mixed too: weights are float32."""
    whole = _fit(tmp_path / "whole", max_epochs=4)
    folder = tmp_path / "run"
    _fit(folder, max_epochs=2, callbacks=[ModelCheckpoint(save_last=True)])
    options = {"callbacks": [ModelCheckpoint(save_last=True)], "lr_scaling": "none"}
    resumed = Deep()
    trainer = quiet(folder, max_epochs=4, precision="fp8-mixed", **options)
    trainer.fit(resumed, loader(32, batch_size=8), ckpt_path="last")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.state_dict().items())
    other = Deep()
    trainer = quiet(folder, max_epochs=5, precision="bf16-mixed", **options)
    trainer.fit(other, loader(32, batch_size=8), ckpt_path="last")
    assert {value.dtype for value in other.state_dict().values()} == {torch.float32}


def test_a_model_without_such_layers_is_refused(tmp_path: Path):
    """The layers are named with their sizes."""
    with pytest.raises(ConfigError, match=r"no layer of the Task can multiply.*model \(3 x 1\)"):
        quiet(run_dir=tmp_path, max_epochs=1, precision="fp8-mixed").fit(Line(), loader(8))


@pytest.mark.parametrize(
    ("capability", "said"),
    [(None, "engine.device is cpu"), ((8, 0), "A100 has compute capability 8.0")],
)
def test_devices_without_float8_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, said: str
):
    """With what the device is, and what to use."""
    monkeypatch.setattr(Float8Precision, "imitates", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=f"{said}: products in float8 need .* 8.9 or newer"):
        precision_of("fp8-mixed", torch.device("cuda" if capability else "cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert precision_of("fp8-mixed", torch.device("cuda")).compute_dtype is torch.bfloat16


def test_a_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch):
    """With the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"torchao is not installed: pip install 'trainkit\[fp8\]'"
    ):
        Float8Precision("fp8-mixed", torch.device("cpu"))


def test_the_names_of_all_precisions_are_listed():
    """An unknown one is answered with the core's and the extensions'."""
    with pytest.raises(ConfigError, match="bf16-true, 64-true, fp8-mixed"):
        precision_of("fp8", torch.device("cpu"))  # type: ignore[arg-type]
