"""docs/language_models.md, chat models: every command and piece of code runs, with a tiny random
model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from recipes.dpo_data import right_and_wrong_sums
from recipes.sft_data import byte_tokenizer, sums
from tests.helpers.launching import run_command
from tests.helpers.pages import part
from tests.helpers.serving import service

PAGE = part(Path(__file__).parents[2] / "docs" / "language_models.md", "Chat models")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
    if " serve " not in line and not line.startswith("pip ")
]
SIZES = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
@pytest.mark.parallel
@pytest.mark.timeout(1200)
def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command ends well; the code talks with the model that the second one left; peft and
    transformers read the exports of adapters.
    """
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    with (tmp_path / "chats.jsonl").open("w") as lines:
        for conversation in sums()[:80]:
            lines.write(json.dumps({"messages": [*conversation.messages]}) + "\n")
    with (tmp_path / "pairs.jsonl").open("w") as lines:
        for pair in right_and_wrong_sums()[:40]:
            row = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
            lines.write(json.dumps(row) + "\n")
    assert len(COMMANDS) >= 17
    for line in COMMANDS:
        line += " logger=csv trainer.limit_val_batches=2" * (" fit " in line)
        done = run_command(line, tmp_path, OMP_NUM_THREADS="1", timeout_s=300)
        assert done.code == 0, f"{line}\n{done.text}"
    monkeypatch.chdir(tmp_path)
    code, of_client = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, {})
    with service(tmp_path / "runs" / "chat", "api=openai", cwd=tmp_path) as address:
        exec(of_client.replace("http://127.0.0.1:8000", address), {})
    peft = pytest.importorskip("peft")
    tokens = torch.arange(16).view(2, 8)
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged").eval()
    base = transformers.AutoModelForCausalLM.from_pretrained("base").eval()
    adapted = peft.PeftModel.from_pretrained(base, "adapters").merge_and_unload().eval()
    assert torch.equal(adapted(tokens).logits, merged(tokens).logits)
    assert "'role': 'assistant'" in capsys.readouterr().out
