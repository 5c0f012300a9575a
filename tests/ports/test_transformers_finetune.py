"""A fine-tune as users of transformers write it:
a tokenizer, a collator and a pretrained folder of theirs, and a Task.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

import trainkit
from tests.helpers.threads import ThreadEngine, World

# Ranks are threads here, and `from_pretrained` replaces a method of a class while it loads: of two
# that overlap, the second leaves transformers without tied weights for the rest of the process.
ONE_AT_A_TIME = threading.Lock()
WORDS = ["[PAD]", "[UNK]", "good", "bad", "film", "song", "very", "a"]


@pytest.fixture
def pretrained(tmp_path: Path) -> str:
    """Return a folder with a tiny BERT and a tokenizer of words, as a hub's."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(tmp_path / "tiny")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertForSequenceClassification(
        BertConfig(vocab_size=len(WORDS), **sizes, **off)
    ).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


class Reviews(Dataset[Any]):
    """Sentences of different lengths that end in good or bad."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = " ".join(
            [
                "a",
                *["very"] * (index % 5),
                ("good", "bad")[index % 2],
                ("film", "song")[index % 3 % 2],
            ]
        )
        return {**self.tokenizer(text, truncation=True), "labels": index % 2}


class FineTune(trainkit.Task):
    """The loss and the logits are the model's own."""

    def __init__(
        self, folder: str, learning_rate: float = 1e-2, weight_decay: float = 0.01
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        with ONE_AT_A_TIME:
            self.model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)

    def forward(self, **inputs: Any) -> Any:
        """Return the model's output."""
        return self.model(**inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of the model."""
        loss = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        outputs = self(**batch)
        self.log("val_loss", outputs.loss)
        self.log(
            "val_acc", (outputs.logits.argmax(-1) == batch["labels"]).float().mean(), prog_bar=True
        )

    def configure_optimizers(self) -> Any:
        """Return AdamW without decay of biases and norms, and a linear schedule with warm-up."""
        no_decay = ["bias", "LayerNorm.weight"]
        named = list(self.model.named_parameters())

        def plain(name: str) -> bool:
            return any(part in name for part in no_decay)

        groups = [
            {
                "params": [p for n, p in named if not plain(n)],
                "weight_decay": self.hparams.weight_decay,
            },
            {"params": [p for n, p in named if plain(n)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate)
        scheduler = get_linear_schedule_with_warmup(
            optimizer, 2, self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fine_tune_learns_and_leaves_a_folder(
    ranks: int, pretrained: str, tmp_path: Path
) -> None:
    """Batches are transformers' own BatchEncodings;
    on two ranks the result is that of one, and `from_pretrained` reads it.
    """

    def work(engine: ThreadEngine) -> tuple[float, torch.Tensor]:
        tokenizer = AutoTokenizer.from_pretrained(pretrained)
        collate = DataCollatorWithPadding(tokenizer)
        reviews, task = Reviews(tokenizer), FineTune(pretrained)
        trainer = trainkit.Trainer(
            engine=engine,
            max_epochs=20,
            lr_scaling="none",
            gradient_clip_val=1.0,
            run_dir=str(tmp_path / "run"),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        train = DataLoader(reviews, batch_size=8 // ranks, shuffle=True, collate_fn=collate)
        trainer.fit(task, train, DataLoader(reviews, batch_size=8, collate_fn=collate))
        if trainer.is_global_zero:
            task.model.save_pretrained(tmp_path / "tuned")
        batch = collate([reviews[i] for i in range(6)])
        return trainer.callback_metrics["val_acc"], task.eval()(**batch).logits.detach()

    found = World(ranks).run(work)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    batch = DataCollatorWithPadding(tokenizer)([Reviews(tokenizer)[i] for i in range(6)])
    tuned = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    with torch.no_grad():
        logits = tuned(**batch).logits
    for accuracy, own in found:
        assert accuracy == pytest.approx(1.0)
        torch.testing.assert_close(logits, own)
