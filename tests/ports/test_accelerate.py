"""Accelerate's two first examples, images and texts, and the same loops on trainkit.Loop: losses,
weights and scores agree.

Each runs in this process as Accelerate runs it, with its Accelerator, and as its user would move
it.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import trainkit
from tests.helpers.threads import World

EPOCHS = 3
# losses of rank 0's batches, an accuracy an epoch, the model
Result = tuple[list[float], list[float], nn.Module]


def loop(run_dir: Path, *args: Any, engine: Any = "auto", **settings: Any) -> trainkit.Loop:
    """Return a quiet Loop in float64: in float32 Adam makes rounding visible."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    own = {
        "engine": engine,
        "max_epochs": EPOCHS,
        "precision": "64-true",
        "lr_scaling": "none",
        "run_dir": str(run_dir),
    }
    return trainkit.Loop(*args, **{**own, **quiet, **settings})


def accuracy(accelerator: Accelerator, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Return the accuracy of batches of (logits, labels), as Accelerate's examples count it."""
    accurate = elements = 0
    for logits, labels in batches:
        predictions, references = accelerator.gather_for_metrics((logits.argmax(-1), labels))
        accurate += int((predictions == references).sum())
        elements += len(references)
    return accurate / elements


def weights(model: nn.Module) -> Tensor:
    """Return all weights as a vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# -- images: a frozen backbone, a rate of one cycle -----------------------------------------------------------------------


@functools.cache
def pets() -> tuple[TensorDataset, TensorDataset]:
    """Return images of three classes to train and to evaluate;
    their numbers do not divide by the batch size.
    """
    generator = torch.Generator().manual_seed(42)
    labels = torch.arange(70) % 3
    images = torch.randn(70, 3, 8, 8, generator=generator, dtype=torch.float64) + labels.view(
        -1, 1, 1, 1
    )
    return TensorDataset(images[:48], labels[:48]), TensorDataset(images[48:], labels[48:])


@functools.cache
def classifier() -> nn.Module:
    """Return a frozen backbone with norms, and a head that learns."""
    torch.manual_seed(1)
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    backbone.requires_grad_(False)
    return nn.Sequential(backbone, nn.Linear(8, 3)).double()


def parts_of_images(
    batch_size: int,
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], DataLoader[Any]]:
    """Return what both loops begin with."""
    model = copy.deepcopy(classifier())
    train, val = (DataLoader(data, batch_size=batch_size) for data in pets())
    return model, torch.optim.Adam(model.parameters(), lr=3e-2 / 25), train, val


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return the example's schedule."""
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-2, epochs=EPOCHS, steps_per_epoch=steps
    )


def images_with_accelerate() -> Result:
    """Train as cv_example.py does."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, train, val = parts_of_images(8)
    model, optimizer, train, val, scheduler = accelerator.prepare(
        model, optimizer, train, val, one_cycle(optimizer, 6)
    )
    losses, accuracies = [], []
    for _ in range(EPOCHS):
        model.train()
        for images, labels in train:
            loss = functional.cross_entropy(model(images), labels)
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            accuracies.append(
                accuracy(accelerator, [(model(images), labels) for images, labels in val])
            )
    return losses, accuracies, accelerator.unwrap_model(model)


def images_with_trainkit(run_dir: Path, engine: Any = "auto", ranks: int = 1) -> Result:
    """Train the same: each rank's batch is its part of Accelerate's."""
    model, optimizer, train, val = parts_of_images(8 // ranks)
    scheduler = one_cycle(optimizer, 6)
    losses, accuracies = [], []
    with loop(
        run_dir, model, optimizer, train, val, engine=engine, sync_batchnorm=ranks > 1
    ) as own:
        for _ in own.epochs():
            for images, labels in own.batches():
                loss = functional.cross_entropy(model(images), labels)
                losses.append(loss.item())
                own.backward(loss)
                scheduler.step()
            for images, labels in own.validation():
                own.log("accuracy", (model(images).argmax(-1) == labels).double().mean())
            accuracies.append(float(own.trainer.callback_metrics["accuracy"]))
    return losses, accuracies, model


# -- texts: a transformer, batches of a dict, several batches a step ------------------------------------------------------


@functools.cache
def bert() -> nn.Module:
    """Return a small BERT without dropout, of two classes."""
    torch.manual_seed(2)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=32, num_labels=2, **sizes, **off)
    ).double()


def sentences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Return sentences of eight words whose class is whether the
    first word is one of the first half.
    """
    words = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [
        {"input_ids": line, "attention_mask": torch.ones(8), "labels": (line[0] < 16).long()}
        for line in words
    ]


def parts_of_texts(
    batch_size: int,
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], DataLoader[Any], Any]:
    """Return what both loops begin with; 64 sentences are 8 steps of two batches of 4."""
    model = copy.deepcopy(bert())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=4, num_training_steps=8 * EPOCHS
    )
    train, val = (DataLoader(sentences(*of), batch_size=batch_size) for of in ((64, 3), (21, 4)))  # type: ignore[arg-type]
    return model, optimizer, train, val, scheduler


def texts_with_accelerate() -> Result:
    """Train as nlp_example.py does, with `accumulate` for steps of two batches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, train, val, scheduler = accelerator.prepare(*parts_of_texts(4))
    losses, accuracies = [], []
    for _ in range(EPOCHS):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            accuracies.append(
                accuracy(accelerator, [(model(**batch).logits, batch["labels"]) for batch in val])
            )
    return losses, accuracies, accelerator.unwrap_model(model)


def texts_with_trainkit(run_dir: Path, engine: Any = "auto", ranks: int = 1) -> Result:
    """Train the same; the schedule is passed, and moves once a step as it does in Accelerate."""
    model, optimizer, train, val, scheduler = parts_of_texts(4)
    losses, accuracies = [], []
    steps = {
        "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        "accumulate_grad_batches": 2 // ranks,
    }
    with loop(run_dir, model, optimizer, train, val, engine=engine, **steps) as own:
        for _ in own.epochs():
            for batch in own.batches():
                loss = model(**batch).loss
                losses.append(loss.item())
                own.backward(loss)
            for batch in own.validation():
                own.log(
                    "accuracy",
                    (model(**batch).logits.argmax(-1) == batch["labels"]).double().mean(),
                )
            accuracies.append(float(own.trainer.callback_metrics["accuracy"]))
    return losses, accuracies, model


EXAMPLES = {
    "images": (images_with_accelerate, images_with_trainkit),
    "texts": (texts_with_accelerate, texts_with_trainkit),
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_numbers_are_accelerates(kind: str, tmp_path: Path) -> None:
    """Each batch's loss, each epoch's score and the weights,
    to the rounding of a mean in float64.
    """
    theirs, ours = EXAMPLES[kind]
    losses, accuracies, model = theirs()
    own_losses, own_accuracies, own_model = ours(tmp_path)
    assert own_losses == pytest.approx(losses, abs=1e-10)
    assert own_accuracies == pytest.approx(accuracies, abs=1e-12)
    assert torch.allclose(weights(own_model), weights(model), atol=1e-10, rtol=0)
    assert losses[-1] < losses[0] and own_accuracies[-1] > 0.5


@pytest.mark.parametrize("kind", EXAMPLES)
def test_two_ranks_train_the_same_model(kind: str, tmp_path: Path) -> None:
    """With half of the batch, or of the batches, on each; the schedule moves once a step."""
    _, train = EXAMPLES[kind]
    _, accuracies, lone = train(tmp_path / "one")
    for _, others, model in World(2).run(lambda engine: train(tmp_path / "two", engine, 2)):
        assert torch.allclose(weights(model), weights(lone), atol=1e-10, rtol=0)
        assert others == pytest.approx(accuracies, abs=1e-12)
