"""`python -m trainkit evaluate`: the numbers of lm-eval's own harness, on tasks in files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from recipes.sft_data import byte_tokenizer
from tests.helpers.launching import run_command
from trainkit.errors import TaskError
from trainkit.extensions.suites import command, evaluated

lm_eval = pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # lm-eval's own
CHOICES = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TINY = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks, the run of a language model, and one of another kind."""
    folder = tmp_path_factory.mktemp("suites")
    rows = [
        {"question": f"{a} + {a} =", "choices": [f" {n}" for n in range(2 * a, 2 * a + 3)]}
        | {"answer": a % 2}
        for a in range(12)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(CHOICES)
    (folder / "answers.yaml").write_text(ANSWERS)
    (folder / "absent.yaml").write_text(CHOICES.replace("sums.jsonl", "absent.jsonl"))
    for line in (
        "fit conf=llama trainer.max_steps=2 task.context=64 data.context=64 run_dir=run",
        "fit conf=mlp trainer.max_steps=2 run_dir=pictures",
    ):
        line = f"python -m trainkit {line} logger=csv"
        done = run_command(line, folder, OMP_NUM_THREADS="1")
        assert done.code == 0, done.text
    return folder


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The project as the working directory; datasets keeps its copies elsewhere."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(project)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return project


def by_lm_eval(*arguments: Any, **settings: Any) -> Any:
    """Return the results of lm-eval's own harness, without its list of 14,000 tasks, which it would
    read for seven seconds.
    """
    own = lm_eval.tasks.TaskManager(include_defaults=False)
    return lm_eval.simple_evaluate(*arguments, task_manager=own, **settings)


def evaluate(line: str) -> int:
    """Run the command."""
    return command.main("evaluate", line.split())


@pytest.mark.parallel
def test_the_numbers_are_lm_evals(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of choices and of made texts: the table that lm-eval prints of the exported folder, and its
    numbers in the run's folder; results of another task stay there.
    """
    line = "python -m trainkit export ckpt_path=last run_dir=run format=huggingface output=model"
    assert run_command(line, here).code == 0
    assert evaluate("run suite=lm-eval tasks=sums.yaml num_fewshot=1 batch_size=4") == 0
    out = capsys.readouterr().out
    settings: dict[str, Any] = {"num_fewshot": 1, "batch_size": 4, "device": "cpu"}
    given = {"pretrained": str(here / "model")}
    theirs = by_lm_eval("hf", given, ["sums.yaml"], **settings)
    assert lm_eval.utils.make_table(theirs).strip() in out
    assert evaluate("run suite=lm-eval tasks=answers.yaml limit=0.5 --json") == 0
    facts = json.loads(capsys.readouterr().out)
    file = here / "run" / "reports" / "lm-eval" / "epoch=0-step=2.json"
    assert Path(facts["file"]) == file.relative_to(here)
    held = json.loads(file.read_text())["tasks"]
    assert [*held] == ["sums", "answers"]
    of_sums = theirs["results"]["sums"]
    for name in ("acc,none", "acc_stderr,none"):
        assert held["sums"]["values"][name] == of_sums[name]
    assert (held["sums"]["num_fewshot"], held["sums"]["samples"]) == (1, 12)
    assert held["answers"]["samples"] == 6
    assert held["answers"]["values"] == facts["tasks"]["answers"]["values"]
    theirs = by_lm_eval("hf", given, ["answers.yaml"], limit=0.5, device="cpu")
    assert (
        held["answers"]["values"]["exact_match,none"]
        == (theirs["results"]["answers"]["exact_match,none"])
    )
    assert [path.name for path in (here / "run").glob(".evaluate-*")] == []


def test_a_folder_of_transformers_is_evaluated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the chat template of its tokenizer too; a task has a name within include_path."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    model.save_pretrained(here / "chat")
    (here / "named").mkdir()
    shutil.copy(here / "sums.yaml", here / "named")
    line = "chat suite=lm-eval tasks=sums include_path=named limit=4"
    assert evaluate(line) == 2
    assert "chat has no tokenizer. Give the folder" in capsys.readouterr().err
    byte_tokenizer().save_pretrained(here / "chat")
    assert evaluate(f"{line} apply_chat_template=true --json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] is None and facts["tasks"]["sums"]["samples"] == 4
    theirs = by_lm_eval(
        "hf",
        {"pretrained": "chat"},
        ["sums.yaml"],
        limit=4,
        apply_chat_template=True,
        device="cpu",
    )
    assert facts["tasks"]["sums"]["values"]["acc,none"] == theirs["results"]["sums"]["acc,none"]


def test_an_encoder_is_not_evaluated_with_random_weights(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """lm-eval itself would give it an output layer, and print numbers."""
    config = transformers.BertConfig(**TINY | {"num_hidden_layers": 1})
    transformers.BertForMaskedLM(config).save_pretrained(here / "encoder")
    assert evaluate("encoder suite=lm-eval tasks=sums.yaml") == 2
    assert "has a model of the class BertForMaskedLM, which is no causal" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_run_of_another_kind_is_refused(here: Path) -> None:
    """The error says what its Task lacks, and nothing is left in the run's folder."""
    before = sorted(path.name for path in (here / "pictures").iterdir())
    with (
        pytest.raises(TaskError, match=r"lm-eval evaluates models.*has no export_huggingface\(\)"),
        evaluated.opened(here / "pictures", "last", []),
    ):
        pass
    assert sorted(path.name for path in (here / "pictures").iterdir()) == before


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("suite=lm-eval tasks=sums.yaml", 2, "The run's folder comes first"),
        ("run tasks=sums.yaml", 2, "suite is missing; write suite=VALUE: the harness."),
        ("run suite=lm-eval", 2, "tasks is missing"),
        ("run suite=lm_eval tasks=sums.yaml", 2, "suite is 'lm_eval'; it must be lm-eval."),
        ("run suite=lm-eval tasks=[]", 2, "tasks is '[]'; it must be names of"),
        ("run suite=lm-eval tasks=no.yaml", 2, "tasks has 'no.yaml', and there is no such file."),
        ("absent suite=lm-eval tasks=sums.yaml", 2, "absent is neither a run"),
        ("run suite=lm-eval tasks=sums.yaml limit=0", 2, "limit is '0'; it must be a number of"),
        ("run suite=lm-eval tasks=sums.yaml limit=1.5", 2, "limit is '1.5'; it must be"),
        ("run suite=lm-eval tasks=sums.yaml batch_size=0", 2, "batch_size is '0'; it must be"),
        ("run suite=lm-eval tasks=sums.yaml batch=2", 2, "Did you mean 'batch_size'?"),
        ("run suite=lm-eval tasks=sums.yaml apply_chat_template=1", 2, "must be true or false"),
        ("run suite=lm-eval tasks=sums include_path=no", 2, "include_path is 'no', and there"),
        ("run suite=lm-eval tasks=sums.yaml ckpt_path=best/x", 1, "ckpt_path is 'best/x'"),
        ("run suite=lm-eval tasks=absent.yaml", 1, "lm-eval cannot load it: FileNotFoundError"),
        ("run suite=lm-eval tasks=hellasweg", 2, "lm-eval lacks. Did you mean 'hellaswag'?"),
    ],
)
def test_a_mistake_is_a_sentence(
    line: str, code: int, error: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2 before the model is read; 1 for what is not as it should be in a folder."""
    assert evaluate(line) == code
    text = capsys.readouterr().err
    assert error in " ".join(text.split()) and "Traceback" not in text


def test_settings_of_a_run_have_no_effect_on_a_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused."""
    (here / "plain").mkdir()
    (here / "plain" / "config.json").write_text("{}")
    for setting in ("ckpt_path=best", "trust=mine"):
        assert evaluate(f"plain suite=lm-eval tasks=sums.yaml {setting}") == 2
        assert "which has no effect: plain is a folder of" in capsys.readouterr().err


@pytest.mark.parallel
def test_several_ranks_are_refused(here: Path) -> None:
    """By each of them, in words."""
    line = "torchrun --nproc-per-node 2 -m trainkit evaluate run suite=lm-eval tasks=sums.yaml"
    done = run_command(line, here)
    assert done.code != 0
    assert "evaluate runs in one process, and torchrun has started 2." in " ".join(done.err.split())
