"""What stands beside the weights in a folder for the hub: tokenizer, generation config, card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.launching import run_command
from tests.helpers.tokenizers import TEXT, train_tokenizer
from trainkit.extensions.exporting.from_run import load_task
from trainkit.extensions.exporting.hub_files import write_generation
from trainkit.extensions.exporting.model_card import CardFacts, write_card

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parallel  # each starts a command
SMALL = "task.context=16 data.context=16 logger=csv"


def run(line: str, folder: Path) -> str:
    """Run a command that ends well; return its output."""
    done = run_command(f"python -m trainkit {line}", folder, OMP_NUM_THREADS="1", timeout_s=200)
    assert done.code == 0, done.text
    return done.out


def read_card(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a card's header, and the rows of its tables."""
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    cells = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if " | " in line]
    return yaml.safe_load(header), {pair[0]: pair[1] for pair in cells if len(pair) == 2}


def test_a_language_model_ends_its_texts_in_transformers_as_here(tmp_path: Path) -> None:
    """The logits are the Task's, the greedy text that of `generate`, the tokenizer the data's, and
    the card holds the contract.
    """
    (tmp_path / "text.txt").write_text(TEXT * 80)
    train_tokenizer(tmp_path / "tokenizer.json", ("</s>",))
    run("data tokens text.txt output=tokens tokenizer=tokenizer.json", tmp_path)
    fit = f"fit conf=llama data.root=tokens data.vocab_size=300 trainer.max_steps=4 {SMALL}"
    run(f"{fit} trainer.accumulate_grad_batches=2 run_dir=run", tmp_path)
    run("export ckpt_path=last run_dir=run format=huggingface output=mine", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "mine")
    task, _ = load_task("last", str(tmp_path / "run"), [])
    tokens = torch.arange(32).view(2, 16)
    assert torch.equal(model(tokens).logits, task(tokens))
    end = tokenizer.convert_tokens_to_ids("</s>")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "mine")
    assert generation.eos_token_id == model.generation_config.eos_token_id == end
    asked = "prompt=To max_new_tokens=8 temperature=0"
    printed = run(f"generate run {asked}", tmp_path)
    ids = model.generate(**tokenizer("To", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert f"\n{tokenizer.decode(ids[0], skip_special_tokens=True)}\n" in printed
    header, rows = read_card(tmp_path / "mine")
    assert header["library_name"] == "transformers" and header["tags"] == ["trainkit"]
    assert header["pipeline_tag"] == "text-generation" and "base_model" not in header
    assert rows["global batch"] == "16 per rank x 1 rank x 2 accumulated = 32 samples"
    assert rows["learning rate"].startswith("0.004 x sqrt(1 rank) = 0.004 (lr_scaling=sqrt)")
    assert (rows["steps"], rows["samples seen"], rows["tokens seen"]) == ("4", "128", "2,048")
    assert rows["optimizer"].startswith("torch.optim.AdamW(lr=0.004, betas=[0.9, 0.95]")
    assert (rows["config"], rows["precision"]) == ("llama", "32-true")
    assert {"val/loss", "torch", "schedule", "seed"} <= {*rows}
    assert str(tmp_path) not in (tmp_path / "mine" / "README.md").read_text()


def test_a_chat_model_without_its_pretrained_folder_has_a_tokenizer(tmp_path: Path) -> None:
    """A run that was killed, or whose weights were split, has left none: the data's is taken, with
    its template; answers end where the template ends them. Adapters alone have both too.
    """
    pytest.importorskip("peft")
    fit = "fit conf=sft callbacks=lora trainer.max_steps=1 logger=csv run_dir=run"
    run(fit, tmp_path)
    shutil.rmtree(tmp_path / "run" / "pretrained")
    for kind in ("huggingface", "peft"):
        run(f"export ckpt_path=last run_dir=run format={kind} output={kind}", tmp_path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / kind)
        assert len(tokenizer) == 259 and "assistant" in tokenizer.chat_template
    generation = json.loads((tmp_path / "huggingface" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    header, _ = read_card(tmp_path / "peft")
    assert header["library_name"] == "peft"
    assert "PeftModel.from_pretrained" in (tmp_path / "peft" / "README.md").read_text()


def test_a_model_whose_answers_have_no_end_has_none(tmp_path: Path) -> None:
    """transformers' generate fails on an empty list of them."""
    source: Any = SimpleNamespace(stops=lambda answers: set(), answers=False)
    write_generation(tmp_path, source)
    assert not list(tmp_path.iterdir())


def test_a_card_says_only_what_is_known(tmp_path: Path) -> None:
    """Of a checkpoint of weights alone: no rates, samples or tokens; no path of this machine, and
    of a hub's model its name.
    """
    optimizer = {"_target_": "mine.Own", "lr": 0.1, "file": "/home/me/secret", "betas": [0.9, 0.95]}
    task = {"model": "org/base", "optimizer": optimizer}
    config = {"conf": "sft", "task": task, "data": {"file": "/home/me/chats.jsonl"}}
    manifest = {"global_step": 7, "metrics": {"a|b": 0.123456789}, "config": config}
    (tmp_path / "config.json").write_text("{}")
    write_card(tmp_path, CardFacts("mine", manifest, {}, 10, "Mine"))
    header, rows = read_card(tmp_path)
    assert header["base_model"] == "org/base" and "pipeline_tag" not in header
    assert rows == {
        "config": "sft",
        "task": "Mine",
        "optimizer": "mine.Own(lr=0.1, betas=[0.9, 0.95])",
        "steps": "7",
        "a\\|b": "0.123457",
    }
    assert "/home" not in (tmp_path / "README.md").read_text()
    (tmp_path / "org" / "base").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        write_card(tmp_path, CardFacts("mine", manifest, {}, 10, "Mine"))
    assert "base_model" not in read_card(tmp_path)[0]  # a folder here of that name
