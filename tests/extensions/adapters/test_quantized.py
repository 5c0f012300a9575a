"""Adapters beside weights of 4 bits (QLoRA): the gradients are those beside the plain weights that
these stand for, and so is the merged model.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.sft import ChatModel
from tests.helpers.toy import quiet
from trainkit.callbacks import LoRA
from trainkit.checkpoint.weights import read_weights
from trainkit.errors import ConfigError
from trainkit.extensions.adapters import quantized
from trainkit.extensions.exporting.export import export

pytest.importorskip("bitsandbytes")
# peft reads what transformers renames
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
TOKENS = torch.arange(24).view(2, 12)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of transformers with random weights."""
    transformers.utils.logging.disable_progress_bar()
    place = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(place)
    return str(place)


def chat(folder: str | None, **options: Any) -> ChatModel:
    """Return the Task on the folder's model, in 4 bits."""
    sgd = partial(torch.optim.SGD, lr=0.5)
    return ChatModel(sgd, model=folder, quantization="nf4", save_pretrained=False, **options)


def adapters() -> LoRA:
    """Return the callback."""
    return LoRA("all-linear", r=4, lora_alpha=8)


def conversations() -> DataLoader[Any]:
    """Return eight sequences, and all their tokens to predict."""
    ids = torch.arange(8 * 12).view(8, 12) * 7 % 64
    return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=4)  # type: ignore[arg-type]


def fitted(task: ChatModel, place: Path, **options: Any) -> Any:
    """Return the trainer after a fit of six steps with validation."""
    settings: dict[str, Any] = {"callbacks": [adapters()], "max_epochs": 3} | options
    trainer = quiet(place, enable_checkpointing=True, **settings)
    torch.manual_seed(4)  # of the adapters' first values
    trainer.fit(task, conversations(), conversations())
    return trainer


def trained(task: torch.nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters, copied."""
    return {
        name: parameter.detach().clone()
        for name, parameter in task.named_parameters()
        if parameter.requires_grad
    }


def test_it_trains_as_beside_the_plain_weights(folder: str, tmp_path: Path) -> None:
    """After six steps, with a validation before them and between, the adapters are those that a fit
    beside the weights of 4 bits written out has; nothing else has moved.
    """
    task = chat(folder)
    plain = ChatModel(task.optimizer, model_type="llama", config=SIZES, save_pretrained=False)
    written_out = copy.deepcopy(task.model)
    quantized.dequantize(written_out)
    plain.model.load_state_dict(written_out.state_dict())
    before = {key: value.clone() for key, value in task.model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*autograd kernel was not registered.*")
        fitted(task, tmp_path / "quantized", num_sanity_val_steps=1)
    fitted(plain, tmp_path / "plain", num_sanity_val_steps=1)
    ours, theirs = trained(task), trained(plain)
    assert {*ours} == {*theirs} and len(ours) == 14
    for name, values in ours.items():
        torch.testing.assert_close(values, theirs[name], rtol=1e-4, atol=1e-6)
        assert "lora_B" not in name or values.abs().max() > 1e-3
    held = {
        key.replace(".base_layer", "").removeprefix("model."): value
        for key, value in task.named_parameters()
        if "lora_" not in key
    }
    for key, value in held.items():
        assert torch.equal(value.data, before[key])


def test_a_checkpoint_holds_the_adapters_and_resumes(folder: str, tmp_path: Path) -> None:
    """Its weights are the adapters and the fingerprint; a resumed run ends as an uninterrupted one."""
    whole = chat(folder)
    fitted(whole, tmp_path / "whole")
    fitted(chat(folder), tmp_path / "part", max_epochs=2)
    resumed = chat(folder)
    settings: dict[str, Any] = {"callbacks": [adapters()], "max_epochs": 3}
    trainer = quiet(tmp_path / "part", enable_checkpointing=True, **settings)
    trainer.fit(resumed, conversations(), conversations(), ckpt_path="last")
    weights = read_weights(str(tmp_path / "part" / "checkpoints" / "last"))
    assert {name.partition("lora_")[1] for name in weights} == {"lora_", ""}
    assert [name for name in weights if "lora_" not in name] == ["base_fingerprint"]
    for name, values in trained(whole).items():
        assert torch.equal(values, trained(resumed)[name])


def test_the_merged_model_answers_as_the_trained_one(folder: str, tmp_path: Path) -> None:
    """Its weights are plain and in float32; transformers loads them with equal logits."""
    callback = adapters()
    task = chat(folder)
    fitted(task, tmp_path / "run", callbacks=[callback])
    task.eval()
    with torch.no_grad():
        expected = task(TOKENS)
    callback.fold(task)
    assert not quantized.quantized_layers(task)
    rebuilt = chat(folder)
    quantized.dequantize(rebuilt)
    export(task, tmp_path / "merged", "huggingface", rebuilt=rebuilt)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32}
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-5)


def test_peft_puts_the_adapters_on_the_same_base(folder: str, tmp_path: Path) -> None:
    """The folder that the callback writes is peft's."""
    callback = adapters()
    task = chat(folder)
    fitted(task, tmp_path / "run", callbacks=[callback])
    callback.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(chat(folder).model, tmp_path / "adapters").eval()
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, task.eval()(TOKENS))


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({}, {"callbacks": []}, "weights of 4 bits cannot be trained, only adapters"),
        ({}, {"precision": "64-true"}, "computed with in float32, bf16 or fp16"),
        (
            {},
            {"callbacks": [LoRA("all-linear", base="weights.pt")]},
            "callbacks.lora.base is 'weights.pt', and the model is loaded in 4 bits",
        ),
    ],
    ids=["no adapters", "float64", "a base"],
)
def test_a_fit_is_refused(
    options: dict[str, Any], settings: dict[str, Any], message: str, folder: str, tmp_path: Path
) -> None:
    """What would train nothing, or compute no numbers."""
    with pytest.raises(ConfigError, match=message):
        fitted(chat(folder, **options), tmp_path, **settings)


def test_weights_of_4_bits_are_not_split(folder: str) -> None:
    """By engine=fsdp, before anything is replaced."""
    engine = SimpleNamespace(name="fsdp", ranks=SimpleNamespace(tensor_size=1), splits_weights=True)
    run: Any = SimpleNamespace(callbacks=[], engine=engine)
    with pytest.raises(ConfigError, match="engine=fsdp splits weights over the ranks, and those"):
        adapters().setup(run, chat(folder), "fit")


def test_random_weights_and_a_missing_package_are_refused(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match=r"task\.model is null: random weights"):
        chat(None)
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'trainkit\[bitsandbytes\]'"):
        chat(folder)


def test_the_run_says_what_has_4_bits(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of weights, not of the bytes that hold two each."""
    fitted(chat(folder), tmp_path, max_epochs=1)
    assert "7 layers with 28,672 weights of 4 bits" in capsys.readouterr().out
