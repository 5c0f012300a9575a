"""The contenders of benchmarks/finetuning.py: one training, by hand, by conf=sft and by TRL."""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from benchmarks.harness import absent
from benchmarks.peers import nothing_printed
from recipes.sft_data import Conversations
from trainkit.api.callback import Callback
from trainkit.config.compose import ComposedJob, run
from trainkit.config.instantiate import build
from trainkit.extensions.language.packing import IGNORED

BY_HAND, OURS, TRL, BY_ROWS = "by hand", "trainkit", "TRL", "TRL, a row at a time"
LR, R, ALPHA = 1e-3, 8, 16


def _groups(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


class InOrder(Conversations):
    """Conversations whose rows are shuffled once: each contender reads them in this order.

    Attributes:
        tokens: of each step's documents, without padding.
    """

    def setup(self, stage: str) -> None:
        """Read them, the first time."""
        if hasattr(self, "train"):
            return
        super().setup(stage)
        random.Random(0).shuffle(self.train.rows)
        counts = [sum(len(doc.ids) for doc in self.train[i]) for i in range(len(self.train))]
        self.tokens = [sum(step) for step in _groups(counts, self.batch_size)]

    def train_dataloader(self) -> Any:
        """Return the loader."""
        return self._loader(self.train, shuffle=False)


@dataclass
class Work:
    """One training.

    Attributes:
        folder: of the model.
        data: conversations; the layout is in `data.packing`.
        lora: train adapters alone.
        steps: of the training.
        marks: CPU seconds of the process at the end of each step.
        losses: of each microbatch.
    """

    folder: str
    data: InOrder
    lora: bool
    steps: int
    marks: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def model(self) -> Any:
        """Return the model, with the same weights each time."""
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    def adapters(self) -> Any:
        """Return peft's config of what callbacks=lora does."""
        return peft.LoraConfig(r=R, lora_alpha=ALPHA, target_modules="all-linear")

    def end_step(self) -> None:
        """Note the time."""
        self.marks.append(time.process_time())

    def seconds(self) -> list[float]:
        """Return those of each step but the first."""
        assert len(self.marks) == self.steps, (len(self.marks), self.steps)
        return [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]

    def step_losses(self) -> list[float]:
        """Return the loss of each step; microbatches add up."""
        each = len(self.losses) // self.steps
        assert each * self.steps == len(self.losses)
        return [sum(loss.item() for loss in step) for step in _groups(self.losses, each)]


def draw_adapters(model: nn.Module) -> None:
    """Give adapters the same first weights for each contender."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.uniform_(-0.1, 0.1, generator=drawn)


# -- the contenders ------------------------------------------------------------------------------


def _rows(rows: Sequence[Any], pad: int, packed: bool) -> dict[str, Tensor]:
    """Collate by hand."""
    ids, labels, places = [], [], []
    for row in rows:
        ids.append(torch.cat([document.ids for document in row]))
        labels.append(torch.cat([document.labels for document in row]))
        places.append(torch.cat([torch.arange(len(document.ids)) for document in row]))
        labels[-1][places[-1] == 0] = IGNORED
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }
    if packed:
        batch["position_ids"] = pad_sequence(places, batch_first=True)
    else:
        lengths = torch.tensor([[len(row)] for row in ids])
        batch["attention_mask"] = (torch.arange(batch["labels"].shape[1]) < lengths).long()
    return batch


def by_hand(work: Work, folder: str) -> None:
    """Train by a plain loop."""
    data, model = work.data, work.model()
    if work.lora:
        model = peft.get_peft_model(model, work.adapters())
        draw_adapters(model)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)
    collate = partial(_rows, pad=data.tokenizer.pad_token_id, packed=data.packing)
    loader = torch.utils.data.DataLoader(data.train, data.batch_size, collate_fn=collate)
    for batch in islice(loader, work.steps):
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits
        loss = cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        work.losses.append(loss.detach())
        work.end_step()


class Watch(Callback):
    """Notes time and loss of trainkit's steps."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Draw the adapters."""
        draw_adapters(task)

    def on_train_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.work.losses.append(loss.detach())

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Note the time."""
        self.work.end_step()


def by_trainkit(work: Work, folder: str) -> None:
    """Train by conf=sft."""
    jobs: list[ComposedJob] = []
    settings = [
        "conf=sft",
        f"run_dir={folder}",
        f"task.model={work.folder}",
        "data.tokenizer=null",
        f"data.batch_size={work.data.batch_size}",
        f"optimizer.lr={LR}",
        "lr=constant",
        "trainer.lr_scaling=none",
        "trainer.lr_warmup_steps=null",
        f"trainer.max_steps={work.steps}",
        "trainer.limit_val_batches=0",
        "trainer.enable_checkpointing=false",
        "~callbacks.checkpoint",
        "task.save_pretrained=false",
        "engine=single",
    ]
    adapters = ["callbacks=lora", f"callbacks.lora.r={R}", f"callbacks.lora.lora_alpha={ALPHA}"]
    run("fit", settings + (adapters if work.lora else []), False, jobs.append)
    built = build(jobs[0].config, [Watch(work)])
    built.trainer.fit(built.task, datamodule=work.data)


def by_trl(work: Work, folder: str, by_rows: bool = False) -> None:
    """Train by SFTTrainer."""
    import datasets
    import trl

    data = work.data
    datasets.disable_progress_bars()

    class End(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            work.end_step()

    class Watched(trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(*args, **options)
            work.losses.append(loss.detach())
            return loss

    rows = [data.train[i] for i in range(len(data.train))]
    columns: dict[str, list[Any]] = {
        "input_ids": [torch.cat([doc.ids for doc in row]).tolist() for row in rows],
        "labels": [torch.cat([doc.labels for doc in row]).tolist() for row in rows],
    }
    if data.packing:
        columns["seq_lengths"] = [[len(doc.ids) for doc in row] for row in rows]
    options = trl.SFTConfig(
        folder,
        packing=data.packing,
        max_length=data.max_length,
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        per_device_train_batch_size=1 if by_rows else data.batch_size,
        gradient_accumulation_steps=data.batch_size if by_rows else 1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=work.steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Watched(
        work.model(),
        options,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=data.tokenizer,
        callbacks=[End()],
        peft_config=work.adapters() if work.lora else None,
    )
    draw_adapters(trainer.model)
    trainer.train()


CONTENDERS: dict[str, Callable[[Work, str], None]] = {
    BY_HAND: by_hand,
    OURS: by_trainkit,
    TRL: by_trl,
    BY_ROWS: partial(by_trl, by_rows=True),
}


def missing() -> dict[str, str]:
    """Return contender -> why, of those that are not installed."""
    return absent({TRL: "trl", BY_ROWS: "trl"})


def train(name: str, work: Work) -> Work:
    """Let a contender do a work, silently."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), nothing_printed():
        warnings.simplefilter("ignore")
        CONTENDERS[name](work, folder)
    return work
