"""Export of adapters: a folder that peft puts on the base, and the merged model for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from recipes.hf import HFClassifier
from recipes.hf_data import Texts
from recipes.sft import ChatModel
from tests.helpers.launching import run_command
from tests.helpers.toy import Line, loader, quiet
from tests.unit.recipes.test_hf import BERT, SGD
from trainkit.callbacks import LoRA
from trainkit.errors import CheckpointError, ConfigError, TaskError
from trainkit.extensions.capsule.command import main as replay
from trainkit.extensions.exporting.export import export
from trainkit.extensions.exporting.from_run import export_run, load_task
from trainkit.extensions.plan.command import main as plan

SIZES = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
# peft reads what transformers renames
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, and a run of adapters beside it."""
    transformers.utils.logging.disable_progress_bar()
    here = tmp_path_factory.mktemp("adapters")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(here / "base")
    line = (
        "python -m trainkit fit conf=sft task.model=base data.tokenizer=null data.max_length=64"
        " callbacks=lora callbacks.lora.use_dora=true optimizer.lr=0.05 trainer.lr_warmup_steps=0"
        " trainer.max_steps=3 logger=none run_dir=run"
    )
    done = run_command(line, here, OMP_NUM_THREADS="1")
    assert done.code == 0, done.text
    return here


def base(folder: Path) -> Any:
    """Return the base model."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "base").eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Return a model's answers."""
    return model(TOKENS).logits


def test_peft_puts_the_folder_on_the_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of the trained Task, bit for bit; the fit's end leaves the same folder."""
    monkeypatch.chdir(folder)
    for _ in range(2):  # an earlier export is replaced
        export_run("last", "run", "peft", "adapters", [])
    held = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    assert (held["base_model_name_or_path"], held["r"], held["use_dora"]) == ("base", 8, True)
    loaded = peft.PeftModel.from_pretrained(base(folder), "adapters").eval()
    ended = peft.PeftModel.from_pretrained(base(folder), folder / "run" / "pretrained").eval()
    assert torch.equal(logits(loaded), logits(ended))
    assert not torch.equal(logits(loaded), logits(base(folder)))
    merged, _ = load_task("last", "run", [])
    with torch.no_grad():
        torch.testing.assert_close(logits(loaded), merged(TOKENS), rtol=0, atol=1e-5)


def test_transformers_loads_the_merged_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are those of peft's merge_and_unload, bit for bit."""
    monkeypatch.chdir(folder)
    export_run("last", "run", "huggingface", "merged", [])
    merged_model = transformers.AutoModelForCausalLM.from_pretrained("merged").eval()
    assert {*merged_model.state_dict()} == {*base(folder).state_dict()}
    loaded = peft.PeftModel.from_pretrained(base(folder), folder / "run" / "pretrained")
    assert torch.equal(logits(merged_model), logits(loaded.merge_and_unload().eval()))


@pytest.mark.parametrize(
    ("kind", "head"), [("bert", "classifier"), ("deberta-v2", "pooler, classifier")]
)
def test_a_classifiers_new_head_is_trained_and_in_the_folder(
    kind: str, head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft puts the adapters and the head on the base, whatever head that had drawn."""
    place = str(tmp_path / "base")
    config = transformers.AutoConfig.for_model(kind, **BERT)
    transformers.AutoModel.from_config(config).save_pretrained(place)
    task = HFClassifier(2, SGD, model=place)
    trainer = quiet(tmp_path / "run", callbacks=[LoRA("all-linear")], max_steps=2)
    trainer.fit(task, datamodule=Texts(num_classes=2, max_length=64))
    assert f"the head ({head}) is trained whole" in " ".join(capsys.readouterr().out.split())
    torch.manual_seed(99)
    drawn = transformers.AutoModelForSequenceClassification.from_pretrained(place, num_labels=2)
    loaded = peft.PeftModel.from_pretrained(drawn, tmp_path / "run" / "pretrained").eval()
    with torch.no_grad():
        assert torch.equal(logits(loaded), task.eval()(TOKENS))


def test_a_base_that_has_changed_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of task.model is another model by now."""
    monkeypatch.chdir(tmp_path)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained("base")
    saved = str(folder / "run" / "checkpoints" / "last")
    with pytest.raises(CheckpointError, match="trained beside other frozen weights"):
        export_run(saved, None, "peft", "adapters", [])
    assert not Path("adapters").exists()


def test_a_task_without_adapters_has_no_such_folder(tmp_path: Path) -> None:
    """Nor is anything but an earlier folder replaced."""
    with pytest.raises(TaskError, match=r"Line has no adapters.*callbacks=lora"):
        export(Line(), tmp_path / "out", "peft", torch.randn(4, 3))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.txt").touch()
    with pytest.raises(ConfigError, match="something other than a model of transformers or peft"):
        export(Line(), tmp_path / "mine", "peft", torch.randn(4, 3))


def test_adapters_are_written_after_a_fit_in_python(tmp_path: Path) -> None:
    """By the callback, and by export; a form of another library needs them merged."""
    lora, task, x = LoRA("all-linear", r=2), Line(lr=0.01), torch.randn(4, 3)
    with pytest.raises(TaskError, match="LoRA has no adapters yet"):
        lora.save_pretrained(tmp_path / "early")
    quiet(tmp_path / "run", callbacks=[lora], max_epochs=2).fit(task, loader())
    done = export(task, tmp_path / "out", "peft", x, rebuilt=Line())
    assert done.difference == 0.0
    lora.save_pretrained(tmp_path / "again")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("out", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    model = peft.PeftModel.from_pretrained(Line(), tmp_path / "out").eval()
    assert torch.equal(model(x), task.eval()(x))
    assert not torch.equal(model(x), Line()(x))


@pytest.mark.parametrize(("form", "suffix"), [("huggingface", ""), ("safetensors", ".safetensors")])
def test_a_merged_form_is_of_a_checkpoint(tmp_path: Path, form: Any, suffix: str) -> None:
    """The Task that trains keeps its adapters: its weights are not the merged ones."""
    lora = LoRA(["q_proj"], r=2)
    task = ChatModel(lambda groups: torch.optim.SGD(groups, 0.1))
    lora.change_layers(task, lambda function: function())
    task._layers_of = lora
    with pytest.raises(TaskError, match=f"has adapters.*trainkit export.*{form}"):
        export(task, tmp_path / f"out{suffix}", form, TOKENS)


def test_a_step_of_adapters_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A capsule of a run with adapters is rebuilt with them, and refused on another base."""
    fit = (
        "python -m trainkit fit conf=mlp callbacks=[lora,capsule,faults] logger=none run_dir=run"
        " 'callbacks.faults.faults=[{do: nan, step: 1}]' trainer.max_steps=3"
        " trainer.stop_on_nonfinite=true"
    )
    assert "loss is not finite" in run_command(fit, tmp_path, OMP_NUM_THREADS="1").text
    (capsule,) = (tmp_path / "run" / "capsules").iterdir()
    monkeypatch.chdir(tmp_path)
    for seed, expected in ((0, "lora_A.default.weight"), (5, "beside other frozen weights")):
        replay("replay", [str(capsule), f"seed={seed}"])
        shown = capsys.readouterr()
        assert expected in shown.out + shown.err


def test_plan_counts_a_checkpoints_adapters_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With their momenta: 2 x 4 bytes each, and the fingerprint."""
    assert plan("plan", ["conf=mlp", "callbacks=lora", "callbacks.lora.r=1"]) == 0
    numbers = sum(i + o for i, o in ((192, 128), (128, 128), (128, 10)))
    assert f"{(8 * numbers + 32) / 1024:.1f} KiB each" in capsys.readouterr().out
