"""docs/language_models.md, pre-training: every command runs, made small, and leaves what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.launching import run_command
from tests.helpers.pages import part
from tests.helpers.tokenizers import TEXT, train_tokenizer

TITLE = "Pre-train a small language model"
PAGE = part(Path(__file__).parents[2] / "docs" / "language_models.md", TITLE)
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
]
SMALL = (
    " task.size=tiny data.context=32 data.batch_size=2 trainer.lr_warmup_steps=1"
    " trainer.limit_val_batches=1 logger=csv"
)


@pytest.mark.parallel
@pytest.mark.timeout(900)
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Each command ends well; the mixture is printed; the prolonged run has more steps; transformers
    opens the export, with its tokenizer.
    """
    transformers = pytest.importorskip("transformers")
    train_tokenizer(tmp_path / "tokenizer.json")
    for name in ("web", "code"):
        lines = (json.dumps({"text": f"{name} {TEXT}"}) + "\n" for _ in range(40))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    assert len(COMMANDS) >= 8
    shown = ""
    for line in COMMANDS:
        if "conf=llama" in line:
            line = re.sub(r" (task\.size|data\.context|trainer\.max_steps)=\S+", "", line)
            line += SMALL + " trainer.max_steps=2"
        elif " fit " in line:
            line = re.sub(r"max_steps=\d+", "max_steps=4", line)
        done = run_command(line, tmp_path, OMP_NUM_THREADS="1", timeout_s=200)
        assert done.code == 0, f"{line}\n{done.text}"
        shown += done.text
    assert re.search(r"mixture +an epoch of \d+ windows: web 70\.0% of", shown)
    assert any("step=4" in path.name for path in (tmp_path / "runs/mix/checkpoints").iterdir())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "my-llama")
    assert model.config.vocab_size == 32_000
    assert (tmp_path / "my-llama" / "tokenizer.json").is_file()
