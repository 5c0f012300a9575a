"""callbacks=lora: the same weights as a loop by hand with peft, what a checkpoint holds, and what is
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import (
    EMA,
    BackboneFinetuning,
    LoRA,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from trainkit.checkpoint.format import read_state
from trainkit.errors import CheckpointError, ConfigError, TaskError


class Pictures(nn.Module):
    """Rows of 3 numbers as pictures [1, 3, 1]: a convolution, its norm, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, (2, 1)), nn.BatchNorm2d(4)
        self.wide, self.last = nn.Linear(8, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number a row."""
        x = self.norm(self.conv(x.view(-1, 1, 3, 1))).flatten(1)
        return self.last(torch.tanh(self.wide(x)))


class Seen(Line):
    """The model as a Task; SGD with momentum."""

    def __init__(self, **sgd: Any) -> None:
        super().__init__(**{"lr": 0.05, "momentum": 0.9} | sgd)
        with torch.no_grad():
            self.model.norm.running_mean.fill_(0.1)

    def make_model(self) -> nn.Module:
        """Return the model."""
        return Pictures()


def adapters(**settings: Any) -> LoRA:
    """Return the callback for some layers of each kind."""
    return LoRA(**{"target_modules": ["conv", "wide"], "r": 2, "lora_alpha": 3} | settings)


def all_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights and buffers, copied, but for the fingerprint."""
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name.removeprefix("model."): value.detach().clone()
        for name, value in every.items()
        if name != "base_fingerprint"
    }


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_dora": True}, {"use_rslora": True, "modules_to_save": ["last"]}],
    ids=["lora", "dora", "rslora and a whole layer"],
)
def test_it_equals_a_loop_by_hand_with_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    """In float64 all weights are those of get_peft_model and a plain loop, to 1e-12."""
    task, by_hand = Seen(), Seen().model
    config = {"target_modules": ["conv", "wide"], "r": 2, "lora_alpha": 3} | settings
    torch.manual_seed(4)
    trainer = quiet(
        tmp_path, callbacks=[LoRA(**config)], max_epochs=3, precision="64-true", lr_scaling="none"
    )
    trainer.fit(task, loader(20))
    torch.manual_seed(4)
    model = peft.get_peft_model(by_hand, peft.LoraConfig(**config)).double()
    model.train()
    by_hand.norm.eval()
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, 0.9)
    for _ in range(3):
        for x, y in loader(20):
            sgd.zero_grad()
            functional.mse_loss(model(x.double()), y.double()).backward()
            sgd.step()
    trained, expected = all_of(task), all_of(by_hand)
    assert trained.keys() == expected.keys()
    assert any("lora_B" in name and bool(value.any()) for name, value in trained.items())
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-12)


def test_a_checkpoint_holds_the_adapters_and_their_optimizers_state(tmp_path: Path) -> None:
    """Nothing of the frozen layers is in it; a new Task resumes it bit for bit."""

    def fit(folder: Path, steps: int, ckpt_path: str | None = None) -> Seen:
        torch.manual_seed(4)
        trainer = quiet(
            folder, callbacks=[adapters(), ModelCheckpoint(save_last=True)], max_steps=steps
        )
        task = Seen()
        trainer.fit(task, loader(20, shuffle=True), ckpt_path=ckpt_path)
        return task

    ended = fit(tmp_path / "whole", 9)
    fit(tmp_path / "parts", 4)
    held = read_state(tmp_path / "parts" / "checkpoints" / "last")
    assert sorted(held) == [
        "base_fingerprint",
        *(f"model.{layer}.lora_{x}.default.weight" for layer in ("conv", "wide") for x in "AB"),
    ]
    resumed = fit(tmp_path / "parts", 9, "last")
    before = all_of(Seen())
    for name, value in all_of(ended).items():
        assert torch.equal(all_of(resumed)[name], value), name
        if "lora_" not in name:
            assert torch.equal(value, before[name.replace("base_layer.", "")]), name


class Centred(Seen):
    """Subtracts a running mean of its targets, which each step moves; as DINO's centre."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        self.center.mul_(0.9).add_(0.1 * targets.mean())
        return super().training_step((inputs, targets - self.center), batch_idx)


def test_a_buffer_that_steps_change_is_in_a_checkpoint(tmp_path: Path) -> None:
    """A resumed run has its value, and so has an export; a checkpoint without it is read too."""

    def fit(steps: int, ckpt_path: str | None = None) -> Centred:
        torch.manual_seed(4)
        callbacks = [adapters(), ModelCheckpoint(save_last=True)]
        trainer = quiet(tmp_path, callbacks=callbacks, max_steps=steps)
        trainer.fit(task := Centred(), loader(20), ckpt_path=ckpt_path)
        return task

    ended = fit(3)
    assert ended.center != 0
    checkpoint = tmp_path / "checkpoints" / "last"
    assert torch.equal(read_state(checkpoint)["center"], ended.center)
    assert torch.equal(fit(3, "last").center, ended.center)
    state = ended.state_dict()
    del state["center"]  # as of an earlier version
    ended.load_state_dict(state)
    with pytest.raises(RuntimeError, match="base_fingerprint"):
        ended.load_state_dict({})


def trained(folder: Path, task: Seen | None = None, **settings: Any) -> Path:
    """Train for a step; return the checkpoint."""
    callbacks = [adapters(**settings), ModelCheckpoint(save_last=True)]
    quiet(folder, callbacks=callbacks, max_steps=1).fit(task or Seen(), loader(20))
    return (folder / "checkpoints" / "last").resolve()


def moved() -> Seen:
    """Return a Task with one other frozen number."""
    task = Seen()
    with torch.no_grad():
        task.model.last.bias += 0.5
    return task


@pytest.mark.parametrize("way", ["fit", "test", "validate", "predict"])
def test_adapters_of_another_base_are_refused(way: str, tmp_path: Path) -> None:
    """By the fingerprint of all frozen weights, in each entry point."""
    saved = trained(tmp_path / "first")
    for task, is_refused in ((Seen(), False), (moved(), True)):
        trainer = quiet(tmp_path / "second", callbacks=[adapters()], max_steps=2)
        run = getattr(trainer, way)
        if not is_refused:
            run(task, loader(20), ckpt_path=str(saved))
            continue
        with pytest.raises(CheckpointError, match="trained beside other frozen weights"):
            run(task, loader(20), ckpt_path=str(saved))


def test_adapters_of_another_shape_are_refused(tmp_path: Path) -> None:
    """Both shapes are named."""
    saved = trained(tmp_path / "first")
    trainer = quiet(tmp_path / "second", callbacks=[adapters(r=3)], max_steps=2)
    with pytest.raises(CheckpointError, match=r"conv.lora_A.default.weight.*2, 1, 2, 1"):
        trainer.fit(Seen(), loader(20), ckpt_path=str(saved))


def test_a_base_is_read_at_each_start(tmp_path: Path) -> None:
    """Weights of a file lie below the adapters of a first run, of one that resumes and of a test;
    init_weights are adapters.
    """
    plain = {f"model.{k}": v for k, v in moved().model.state_dict().items()}
    torch.save(plain, tmp_path / "base.pt")
    settings = {"base": str(tmp_path / "base.pt")}
    saved = trained(tmp_path / "first", **settings)
    for base, ends in ((settings, True), ({}, False)):
        trainer = quiet(tmp_path / "again", callbacks=[adapters(**base)], max_steps=2)
        task = Seen()
        if ends:
            trainer.fit(task, loader(20), init_weights=str(saved))
            assert torch.equal(task.model.last.bias, plain["model.last.bias"])
            trainer.test(task, loader(20))
        else:
            with pytest.raises(CheckpointError, match="trained beside other frozen weights"):
                trainer.fit(task, loader(20), ckpt_path=str(saved))
    trainer = quiet(tmp_path / "wrong", callbacks=[adapters()], max_steps=2)
    with pytest.raises(CheckpointError, match="must be adapters.*callbacks.lora.base=FILE"):
        trainer.fit(Seen(), loader(20), init_weights=settings["base"])


class Attends(nn.Module):
    """A layer of torch that reads the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.wide = nn.MultiheadAttention(3, 1), nn.Linear(3, 1)


class Ties(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = nn.Linear(3, 3), nn.Linear(3, 3)
        self.conv.weight = self.wide.weight


REFUSED: dict[str, tuple[dict[str, Any], Callable[[], nn.Module], str]] = {
    "no such layer": (
        {"target_modules": ["wid", "conv"]},
        Pictures,
        "names 'wid', and Pictures has no such layer. Did you mean 'wide'.*conv, wide, last",
    ),
    "not one that peft adapts": (
        {"target_modules": ["norm"]},
        Pictures,
        r"names 'norm', which peft does not adapt.*conv \(1\), wide \(1\), last \(1\)",
    ),
    "none": ({"target_modules": []}, Pictures, "target_modules is empty"),
    "no match": (
        {"target_modules": "wide|convs"},
        lambda: nn.Sequential(nn.Linear(3, 1)),
        r"the expression 'wide\|convs', which no layer's whole name matches",
    ),
    "no expression": ({"target_modules": "(wide"}, Pictures, "not a regular expression"),
    "nothing linear": (
        {"target_modules": "all-linear"},
        lambda: nn.Sequential(nn.Conv1d(3, 1, 1)),
        "'all-linear', and .* has no Linear",
    ),
    "nothing to adapt": (
        {},
        lambda: nn.Sequential(nn.LayerNorm(3)),
        "Sequential has no layer that peft adapts",
    ),
    "no layer to exclude": (
        {"exclude_modules": ["lst"]},
        Pictures,
        "exclude_modules names 'lst'.*Did you mean 'last'",
    ),
    "no layer to save": (
        {"modules_to_save": ["lastt"]},
        Pictures,
        "modules_to_save names 'lastt'.*Did you mean 'last'",
    ),
    "no module": ({"module": "modl"}, Pictures, "module is 'modl'.*Did you mean 'model'"),
    "a weight that is read": (
        {"target_modules": "all-linear"},
        Attends,
        r"'attention.out_proj', and nn.MultiheadAttention reads.*exclude_modules=\[out_proj\]",
    ),
    "a shared weight": ({}, Ties, "'conv', which shares its weight with another layer"),
    "all excluded": ({"exclude_modules": ["conv", "wide"]}, Pictures, "peft does not adapt"),
    "adapters already": (
        {},
        lambda: peft.get_peft_model(Pictures(), peft.LoraConfig(target_modules=["conv"])),
        "which has some of peft already",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_cannot_be_adapted_are_refused(case: str, tmp_path: Path) -> None:
    """The error names the setting, the nearest name and what there is; the Task stays plain."""
    settings, make, message = REFUSED[case]
    task = Line()
    task.model = make()
    before = [*task.state_dict()], [p.requires_grad for p in task.parameters()]
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        quiet(tmp_path, callbacks=[adapters(**settings)]).fit(task, loader())
    assert ([*task.state_dict()], [p.requires_grad for p in task.parameters()]) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 3}, "callbacks.lora.alpha: peft calls it lora_alpha"),
        ({"rank": 3}, "callbacks.lora.rank: peft calls it r"),
        ({"r": 0}, "callbacks.lora.r is 0; it must be a whole number, 1 or more"),
        ({"strict": False}, "strict is false, and there is no callbacks.lora.base"),
        ({"lora_dropout": 1.5}, "lora_dropout is 1.5; it must be a number from 0 to 1"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    """And names of others are explained."""
    with pytest.raises(ConfigError, match=message):
        adapters(**settings)


def test_what_thaws_layers_does_not_go_with_it(tmp_path: Path) -> None:
    """No checkpoint would hold them."""
    callbacks = [adapters(), BackboneFinetuning(1, "model.conv")]
    with pytest.raises(ConfigError, match="BackboneFinetuning would thaw"):
        quiet(tmp_path, callbacks=callbacks).fit(Seen(), loader())


@pytest.mark.parametrize(
    ("engine", "tensor", "message"),
    [("fsdp", 2, "engine.tensor is 2"), ("deepspeed", 1, "not been tried with engine=deepspeed")],
)
def test_engines_that_split_layers_otherwise_are_refused(
    engine: str, tensor: int, message: str
) -> None:
    """Before anything is replaced."""
    ranks = SimpleNamespace(tensor_size=tensor)
    run: Any = SimpleNamespace(
        callbacks=[], engine=SimpleNamespace(name=engine, ranks=ranks, splits_weights=True)
    )
    with pytest.raises(ConfigError, match=message):
        adapters().setup(run, Seen(), "fit")


def test_peft_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the error says how to install it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'trainkit\[peft\]'"):
        adapters()


def test_averages_are_of_the_adapters(tmp_path: Path) -> None:
    """EMA saves them, a run resumes bit for bit, and frozen weights stay what they were."""

    def fit(folder: Path, steps: int, ckpt_path: str | None = None) -> Seen:
        torch.manual_seed(4)
        callbacks = [adapters(), EMA(0.5), ModelCheckpoint(save_last=True)]
        task = Seen()
        trainer = quiet(folder, callbacks=callbacks, max_steps=steps)
        trainer.fit(task, loader(20), loader(8), ckpt_path=ckpt_path)
        return task

    ended = fit(tmp_path / "whole", 9)
    fit(tmp_path / "parts", 4)
    resumed = fit(tmp_path / "parts", 9, "last")
    before = all_of(Seen())
    for name, value in all_of(ended).items():
        assert torch.equal(all_of(resumed)[name], value), name
        if "lora_" not in name:
            assert torch.equal(value, before[name.replace("base_layer.", "")]), name


def test_statistics_of_frozen_norms_are_not_recomputed(tmp_path: Path) -> None:
    """No checkpoint would hold them; norms that are trained take them."""
    for norms, is_refused in (([], True), (["norm"], False)):
        callbacks = [adapters(modules_to_save=norms), StochasticWeightAveraging(0.01, 1)]
        trainer = quiet(tmp_path / str(is_refused), callbacks=callbacks, max_epochs=3)
        if is_refused:
            with pytest.raises(ConfigError, match="1 of Seen are frozen by callbacks.lora"):
                trainer.fit(Seen(), loader(20))
        else:
            trainer.fit(Seen(), loader(20))


def test_adapters_need_an_optimizer(tmp_path: Path) -> None:
    """An optimizer of chosen layers would leave them as they began."""

    class Chosen(Seen):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.last.parameters(), 0.1)

    with pytest.raises(TaskError, match=r"conv.lora_A.default.weight.*no optimizer has it"):
        quiet(tmp_path, callbacks=[adapters()]).fit(Chosen(), loader())


def test_another_callback_does_not_adapt_the_task_again(tmp_path: Path) -> None:
    """The same one takes it again, as a test after a fit."""
    task, one = Seen(), adapters()
    quiet(tmp_path, callbacks=[one]).fit(task, loader())
    before = all_of(copy.deepcopy(task))
    quiet(tmp_path, callbacks=[one]).test(task, loader())
    assert all_of(task).keys() == before.keys()
    with pytest.raises(ConfigError, match="another LoRA has replaced them"):
        quiet(tmp_path, callbacks=[adapters()]).test(task, loader())
