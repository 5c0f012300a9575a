"""recipes/dpo.py beside TRL's DPOTrainer, from the same rows: tokens, log-probabilities, losses and
rewards.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.dpo import PreferenceModel, preference_loss
from recipes.dpo_data import PreferencePairs, right_and_wrong_sums
from recipes.sft_data import byte_tokenizer
from trainkit.extensions.language.packing import IGNORED

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="needs trl: make peers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # TRL's and its parts'
    pytest.mark.timeout(300),
]
CONFIG: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROUNDING = 5e-6  # of log-probabilities near 100 in float32
LOSSES = [("sigmoid", 0.0), ("robust", 0.1), ("hinge", 0.0), ("ipo", 0.0)]


def conversations() -> list[dict[str, Any]]:
    """Return rows with a prompt, of unequal length."""
    return [
        {
            "prompt": [{"role": "system", "content": "Add. " * (number % 3)}, *pair.prompt],
            "chosen": pair.chosen,
            "rejected": [{"role": "assistant", "content": "perhaps " * number + "9"}],
        }
        for number, pair in enumerate(right_and_wrong_sums()[:6])
    ]


def implicit() -> list[dict[str, Any]]:
    """Return the same, with the prompt in both conversations."""
    return [
        {key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in conversations()
    ]


def texts() -> list[dict[str, Any]]:
    """Return rows of texts, of which one has no prompt of its own."""
    return [
        {"prompt": f"{n} + {n} = ", "chosen": f"{n + n}", "rejected": f"{n} " * (n + 1) + "or 7"}
        for n in range(6)
    ]


def implicit_texts() -> list[dict[str, Any]]:
    """Return texts that begin alike, up to a space."""
    return [
        {"chosen": f"{n} + {n} = {n + n}!", "rejected": f"{n} + {n} = x{'y' * n}"} for n in range(6)
    ]


def trl_of(rows: list[dict[str, Any]], folder: Path, **options: Any) -> Any:
    """Return TRL's trainer of a tiny random Llama, with another one as the reference."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    torch.manual_seed(0)
    models = [transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)) for _ in range(2)]
    with torch.no_grad():
        for parameter in [*models[0].parameters(), *models[1].parameters()]:
            parameter.mul_(5)  # so that rewards are not small
    arguments = {"report_to": "none", "bf16": False, "use_cpu": True, "beta": 0.3, **options}
    return trl.DPOTrainer(
        models[0].double(),
        models[1].double(),
        args=trl.DPOConfig(str(folder), gradient_checkpointing=False, **arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=byte_tokenizer(),
    )


@pytest.mark.parametrize(
    ("loss_type", "smoothing", "rows", "max_length"),
    [(*loss, conversations, length) for loss in LOSSES for length in (512, 60)]
    + [
        ("ipo", 0.0, rows, length)
        for rows in (implicit, texts, implicit_texts)
        for length in (512, 60)
    ],
)
def test_a_batch_is_that_of_trl(
    loss_type: str, smoothing: float, rows: Any, max_length: int, tmp_path: Path
) -> None:
    """The same rows give the same tokens; log-probabilities under both models, the loss and the
    logged rewards are equal, up to the float32 of TRL's fused head.
    """
    if rows in (texts, implicit_texts):
        max_length //= 4  # they are short
    options = {"loss_type": loss_type, "label_smoothing": smoothing, "max_length": max_length}
    theirs = trl_of(rows(), tmp_path, **options)
    their_batch = theirs.data_collator([theirs.train_dataset[i] for i in range(len(rows()))])
    their_loss = theirs.compute_loss(theirs.model, copy.copy(their_batch)).item()

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    file = str(tmp_path / "rows.jsonl")
    data = PreferencePairs(file, file, max_length=max_length)
    data.setup("fit")
    batch = data.collate([data.val[i] for i in range(len(data.val))])
    assert len(data.val) == len(rows())
    both = [batch["input_ids"][:, side] for side in (0, 1)]
    assert torch.equal(torch.cat(both), their_batch["input_ids"])
    marks = torch.cat([batch["labels"][:, side] != IGNORED for side in (0, 1)])
    assert torch.equal(marks, their_batch["completion_mask"].bool())

    task = PreferenceModel(partial(torch.optim.SGD, lr=0.1)).double()
    task.model = theirs.ref_model
    reference = task.logps(batch)
    expected = theirs.compute_ref_log_probs(theirs.ref_model, copy.copy(their_batch))
    close(reference, torch.stack(expected, 1))
    task.model = theirs.model
    ratios = task.logps(batch) - reference
    lengths = (batch["labels"] != IGNORED).sum(-1)
    loss = preference_loss(ratios, lengths, loss_type, 0.3, smoothing).mean()
    assert loss.item() == pytest.approx(their_loss, rel=1e-6)

    task.beta, logged = 0.3, {}
    task.log = lambda name, value, **how: logged.update({name: value.item()})
    task._evaluate(batch | {"reference": reference}, "train")
    logps = task.logps(batch).mean(0)
    logged |= {"train/logps/chosen": logps[0].item(), "train/logps/rejected": logps[1].item()}
    names = [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
    for name in [*names, "logps/chosen", "logps/rejected"]:
        (value,) = theirs._metrics["train"][name]
        assert logged[f"train/{name}"] == pytest.approx(value, rel=1e-6, abs=ROUNDING)
    assert abs(logged["train/rewards/margins"]) > 1000 * ROUNDING


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Compare log-probabilities: TRL's fused head computes them in float32."""
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-6, atol=ROUNDING)
