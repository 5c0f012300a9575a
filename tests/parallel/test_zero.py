"""DeepSpeed's ZeRO trains as ddp does, on every stage and offload that runs on a CPU,
and its checkpoints fit all engines.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launching import Command
from tests.parallel.starts import Starts, line_of

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed (docs/large_models.md)",
    ),
]

# A sum over 2 ranks is the same in any order; 3 ranks divide no weight of the model evenly.
STARTS = {
    "2 ranks": (2, "plain accumulated two_averages mixed held refused"),
    "3 ranks": (3, "plain empty exchanged"),
}
KINDS = ["stage 1", "stage 2", "stage 3", "stage 2, host", "stage 3, host"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """See Starts."""

    def line(start: str) -> str:
        ranks, scenarios = STARTS[start]
        return line_of("ddp", ranks, "zero.py") + f" {{out}} {scenarios}"

    return Starts(line, tmp_path_factory, timeout_s=500)


def assert_same_end(own: dict[str, Any], expected: dict[str, Any], atol: float = 1e-6) -> None:
    """All weights, buffers and values are the same,
    and the Task is as it was before DeepSpeed took it.
    """
    torch.testing.assert_close(own["state"], expected["state"], rtol=0, atol=atol)
    assert own["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
    assert own["left"] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("start", "scenario"),
    [
        ("2 ranks", "plain"),
        ("2 ranks", "mixed"),
        ("2 ranks", "accumulated"),
        ("3 ranks", "plain"),
        ("3 ranks", "empty"),
    ],
)
def test_training_ends_as_with_ddp(start: str, scenario: str, kind: str, results: Starts) -> None:
    """With plain SGD, bfloat16, and AdamW with accumulation and clipping; on every rank."""
    for rank in results[start][scenario]:
        assert_same_end(rank[kind], rank["ddp"])


@pytest.mark.parametrize("kind", ["stage 1", "stage 2", "stage 2, host"])
def test_ademamix_ends_as_with_ddp(kind: str, results: Starts) -> None:
    """A slow average that grows does so once a step; stage 3 is refused."""
    for rank in results["2 ranks"]["two_averages"]:
        assert_same_end(rank[kind], rank["ddp"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_changes_its_engine(kind: str, results: Starts) -> None:
    """A checkpoint of ddp is resumed by DeepSpeed, and one of DeepSpeed by ddp,
    inside an epoch and with AdamW's momenta.
    """
    for rank in results["3 ranks"]["exchanged"]:
        assert_same_end(rank[f"ddp -> {kind}"], rank["whole"])
        assert_same_end(rank[f"{kind} -> ddp"], rank["whole"])


@pytest.mark.parametrize("pair", ["stage 3 -> stage 1", "stage 2 -> stage 3"])
def test_a_run_changes_its_stage(pair: str, results: Starts) -> None:
    """Stages share the format too."""
    for rank in results["3 ranks"]["exchanged"]:
        assert_same_end(rank[pair], rank["whole"])


def test_state_is_split(results: Starts) -> None:
    """Stage 1 halves the optimizer's state over two ranks,
    stage 3 the weights too (but for padding).
    """
    for rank in results["2 ranks"]["held"]:
        whole, frozen = rank["ddp"], 7 * 7 + 7
        assert rank["stage 1"]["weights"] == whole["weights"]
        for kind in ("stage 1", "stage 3"):
            assert whole["state"] / 2 <= rank[kind]["state"] <= whole["state"] / 2 + 16
        assert (
            whole["weights"] / 2 <= rank["stage 3"]["weights"] <= whole["weights"] / 2 + frozen / 2
        )


@pytest.mark.parametrize(
    ("case", "words", "kept"),
    [
        ("num_samples", "TaskError: Weighing.training_step returned 'num_samples'", True),
        ("thawed", "TaskError: requires_grad of a weight changed during training", False),
        (
            "by tensor",
            "TaskError: The optimizer is LAMB, and with engine=deepspeed it cannot be",
            True,
        ),
        ("float64", "TaskError: The parameter 'scale' is float64", True),
        ("precision", "ConfigError: trainer.precision is '16-mixed'", True),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(
    case: str, words: str, kept: bool, results: Starts
) -> None:
    """On every rank, with the reason; before the first update, unless the cause comes later."""
    for rank in results["2 ranks"]["refused"]:
        assert words in str(rank[case]["error"])
        assert rank[case]["kept"] == kept


GPT = (
    "torchrun --nproc-per-node 2 -m trainkit fit conf=gpt task.model.depth=1 task.model.width=16"
    " task.model.heads=2 data.context=16 data.batch_size=4 data.file=text.txt trainer.max_steps=4"
    " trainer.lr_warmup_steps=0 trainer.limit_val_batches=2 trainer.log_every_n_steps=1"
)


@pytest.fixture
def text(tmp_path: Path) -> None:
    """A text to train on."""
    (tmp_path / "text.txt").write_text(
        "".join(f"{number} and {number * number}, " for number in range(2000))
    )


@pytest.mark.usefixtures("text")
def test_the_command_line_trains_a_gpt_in_stage_3(command: Command) -> None:
    """With DeepSpeed's own settings;
    the banner names the stage and counts all weights, and ddp resumes the run.
    """
    zero = "engine.config={zero_optimization:{stage:3,stage3_param_persistence_threshold:0},gradient_clipping:auto}"
    done = command(f"{GPT} run_dir=run engine=deepspeed '{zero}'")
    assert done.code == 0, done.text
    assert re.search(r"deepspeed, 2 ranks.*ZeRO stage 3", done.text)
    weights = re.search(r"LanguageModel, [\d,]+ parameters", done.text)
    resumed = command(f"{GPT} run_dir=run engine=ddp ckpt_path=last trainer.max_steps=6")
    assert resumed.code == 0, resumed.text
    assert weights is not None and weights[0] in resumed.text
    assert re.search(r"resumed .*at epoch 0, step 4", resumed.text)


@pytest.mark.usefixtures("text")
def test_a_config_that_differs_ends_the_job(command: Command) -> None:
    """Before the first step, with both values."""
    done = command(
        f"{GPT} run_dir=run engine=deepspeed engine.config={{train_micro_batch_size_per_gpu:8}}"
    )
    assert done.code != 0
    assert (
        done.text.count(
            "per_gpu is 8, but the batch size of the data (data.batch_size) is 4: two sources"
        )
        == 1
    ), done.text


def test_deepspeed_check_tries_all_stages(command: Command) -> None:
    """Each stage and offload is compared with one process."""
    done = command("python -m trainkit deepspeed check --no-build", timeout_s=300)
    assert done.code == 0, done.text
    assert done.text.count("  runs   ") == 5
