"""Every command and every piece of code in docs/language_models.md runs,
and leads where the page says.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.test_main_job import read_rows
from tests.helpers.launching import run_command
from tests.helpers.pages import part
from tests.helpers.tokenizers import OF_BERT, TEXT, train_tokenizer

PAGE = part(Path(__file__).parents[2] / "docs" / "language_models.md", "")
WIDTH, CONTEXT = 24, 16
SMALL = (
    f" task.model.width={WIDTH} task.model.depth=1 task.model.heads=2 data.batch_size=2"
    " trainer.global_batch_size=4"
)
SMALL += " trainer.limit_val_batches=1 trainer.lr_warmup_steps=1 logger=csv"
# In the order of the page: a command takes what an earlier one left.
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
    if line and not line.startswith(("pip ", "hf ")) and "push_to_hub" not in line
]


def write_gpt2(folder: Path) -> None:
    """Write a folder as transformers' save_pretrained does,
    of random weights in the sizes of SMALL; by transformers itself.
    """
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.GPT2Config(n_positions=CONTEXT, n_embd=WIDTH, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with texts, tokenizers and weights, in which all commands of the page ran,
    one after the other.
    """
    folder = tmp_path_factory.mktemp("language")
    (folder / "bert").mkdir()
    (folder / "texts").mkdir()
    train_tokenizer(folder / "tokenizer.json")
    train_tokenizer(folder / "bert" / "tokenizer.json", OF_BERT)
    write_gpt2(folder / "gpt2")
    (folder / "prompts.txt").write_text("To be\nThat is the question\n")
    (folder / "my.txt").write_text(TEXT * 99, encoding="utf-8")
    (folder / "texts" / "a.txt").write_text(TEXT * 50, encoding="utf-8")
    (folder / "texts" / "b.jsonl").write_text(
        "".join(json.dumps({"text": TEXT}) + "\n" for _ in range(50))
    )
    (task,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (row,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    (folder / "sums.yaml").write_text(task)
    (folder / "sums.jsonl").write_text(row * 8)
    for line in COMMANDS:
        words = line
        if " fit " in line:
            words = line.replace(" data.context=256", "") + f"{SMALL} data.context={CONTEXT}"
            words += f" trainer.max_steps={4 if 'ckpt_path' in line else 2}"
        done = run_command(words, folder, OMP_NUM_THREADS="1")
        assert done.code == 0, f"{words}\n{done.text}"
    return folder


def test_the_page_has_its_commands() -> None:
    """The fixture above sees them."""
    assert len(COMMANDS) >= 13
    assert {"data", "fit", "plan", "generate", "export", "evaluate"} == {
        re.findall(r"trainkit (\w+)", line)[0] for line in COMMANDS
    }


@pytest.mark.parallel
def test_every_command_of_the_page_runs(place: Path) -> None:
    """What they write is there: tokens, checkpoints of a resumed run,
    and folders of transformers.
    """
    assert {path.name for path in place.iterdir()} >= {
        "tokens",
        "bytes",
        "masked",
        "my-gpt",
        "my-bert",
        "runs",
    }
    assert {path.name for path in (place / "runs" / "gpt" / "checkpoints").glob("epoch=*")} >= {
        "epoch=0-step=4"
    }
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    files += ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (place / "my-gpt").iterdir()) == files
    (results,) = (place / "runs" / "gpt" / "reports" / "lm-eval").iterdir()
    assert json.loads(results.read_text())["tasks"]["sums"]["samples"] == 8


@pytest.mark.parallel
def test_both_engines_train_alike(place: Path) -> None:
    """Two ranks of Horovod and of torch.distributed end with the same val/loss, to rounding."""
    found = [
        [float(row["val/loss"]) for row in read_rows(place / "runs" / run) if row["val/loss"]]
        for run in ("pair", "ddp")
    ]
    assert len(found[0]) > 0
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parallel
def test_the_code_of_the_page_opens_the_export(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers opens model and tokenizer, and the tokenizer gives a text back."""
    monkeypatch.chdir(place)
    task, code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    tokenizer = names["tokenizer"]
    assert (
        tokenizer.decode(tokenizer("That is the question.")["input_ids"]) == "That is the question."
    )
    assert names["model"].config.n_embd == WIDTH
    exec(f"import trainkit\n{task}\nread = Mine().translate_weights({{'encoder.a': 1}})", names)
    assert names["read"] == {"model.a": 1}
