"""recipes/dpo.py: losses by their formulas, weights that do not depend on ranks, a reference that is
the starting model's.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recipes.dpo import PreferenceModel, preference_loss
from recipes.dpo_data import PreferencePairs, right_and_wrong_sums
from recipes.sft_data import byte_tokenizer
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import quiet
from tests.unit.recipes.test_sft import GPT2, LLAMA, SGD, train, weights
from trainkit.callbacks import LoRA, ModelCheckpoint
from trainkit.data.order import shuffled
from trainkit.errors import CheckpointError, ConfigError, DataError, TaskError

STEP = 4  # pairs


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file of 30 pairs of very unequal length."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with path.open("w") as lines:
        for number, pair in enumerate(right_and_wrong_sums()[:30]):
            row = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
            row = copy.deepcopy(row)
            row["prompt"][0]["content"] += " please" * (number * number % 7)
            row["rejected"][0]["content"] += " perhaps" * (number % 3)
            lines.write(json.dumps(row) + "\n")
    return str(path)


def model(**options: Any) -> PreferenceModel:
    """Return a tiny GPT-2, with dropout that is disabled."""
    torch.manual_seed(3)
    config = GPT2 | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    return PreferenceModel(SGD, **{"model_type": "gpt2", "config": config} | options)


def plain_loss(kind: str, beta: float, smoothing: float, of: Tensor, lengths: Tensor) -> Tensor:
    """Return the loss of a pair, as the papers write it."""
    chosen, rejected = of
    margin = beta * (chosen - rejected)
    right, wrong = (-torch.log(1 / (1 + torch.exp(-sign * margin))) for sign in (1, -1))
    if kind == "ipo":
        return (chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return torch.clamp(1 - margin, min=0)
    if kind == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


LOSSES = [("sigmoid", 0.0), ("sigmoid", 0.1), ("robust", 0.1), ("hinge", 0.0), ("ipo", 0.0)]


@pytest.mark.parametrize(("kind", "smoothing"), LOSSES)
def test_a_loss_is_its_formula(kind: str, smoothing: float) -> None:
    """Each pair's loss is that of the paper, in float64."""
    torch.manual_seed(0)
    ratios = 9 * torch.randn(20, 2, dtype=torch.float64)
    lengths = torch.randint(1, 9, (20, 2))
    result = preference_loss(ratios, lengths, kind, 0.3, smoothing)
    rows = zip(ratios, lengths, strict=True)
    expected = torch.stack([plain_loss(kind, 0.3, smoothing, *row) for row in rows])
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def logps_of(task: PreferenceModel, documents: Any) -> Tensor:
    """Return the log-probabilities of documents [2], one by one, by a plain sum."""
    sums = []
    for ids, labels in documents:
        logps_TV = task.model(ids[None]).logits[0, :-1].log_softmax(-1)
        targets = labels[1:]
        taken = [logps_TV[t, token] for t, token in enumerate(targets.tolist()) if token >= 0]
        sums.append(torch.stack(taken).sum())
    return torch.stack(sums)


def loop_by_hand(file: str, steps: int) -> tuple[Tensor, Tensor]:
    """Return weights, and the means of both rewards over the pairs of all steps."""
    task, data = model().double(), PreferencePairs(file)
    start = copy.deepcopy(task).eval()
    data.setup("fit")
    optimizer = SGD(task.parameters())
    order = shuffled(len(data.train), 0, 0)
    rewards = []
    for step in range(steps):
        optimizer.zero_grad()
        for place in order[step * STEP : (step + 1) * STEP]:
            documents = data.train[int(place)].documents
            with torch.no_grad():
                reference = logps_of(start, documents)
            ratios = logps_of(task, documents) - reference
            rewards.append(0.1 * ratios.detach())
            lengths = torch.tensor([int((labels >= 0).sum()) for _, labels in documents])
            (plain_loss("sigmoid", 0.1, 0.0, ratios, lengths) / STEP).backward()
        optimizer.step()
    return weights(task), torch.stack(rewards).mean(0)


@pytest.fixture(scope="module")
def by_hand(file: str) -> tuple[Tensor, Tensor]:
    """Return the result of a plain loop of three steps."""
    return loop_by_hand(file, 3)


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 4), (1, 1), (2, 2), (2, 1)])
def test_steps_are_those_of_a_plain_loop(
    ranks: int, batch_size: int, file: str, by_hand: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    """On 1 and 2 ranks, with accumulation and without, three steps lead to the weights of a loop over
    single pairs that has the starting model beside it, to 1e-12; logged rewards are the means over
    all pairs of all ranks.
    """
    begun = model()

    def fit(engine: ThreadEngine) -> tuple[Tensor, dict[str, float]]:
        task, data = copy.deepcopy(begun), PreferencePairs(file, batch_size=batch_size)
        limits = {"max_epochs": 1, "limit_train_batches": 3 * STEP // (ranks * batch_size)}
        trainer = quiet(
            tmp_path,
            **limits,
            global_batch_size=STEP,
            precision="64-true",
            lr_scaling="none",
            engine=engine,
        )
        trainer.fit(task, datamodule=data)
        return weights(task), dict(trainer.callback_metrics)

    expected, (chosen, rejected) = by_hand
    for result, logged in World(ranks).run(fit):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
        assert logged["train/rewards/chosen_epoch"] == pytest.approx(float(chosen), abs=1e-12)
        margin = logged["train/rewards/margins_epoch"]
        assert margin == pytest.approx(float(chosen - rejected), abs=1e-12)
        assert abs(margin) > 1e-4


def test_the_reference_has_the_same_bits_on_any_ranks(file: str, tmp_path: Path) -> None:
    """Each rank computes a part, and all have the whole: on 1, 2 and 3 ranks the same files."""
    begun, files = model(), []
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        World(ranks).run(
            lambda engine, folder=folder: train(
                engine, begun, PreferencePairs(file, batch_size=4), folder, global_batch_size=None
            )
        )
        files.append({path.name: path.read_bytes() for path in (folder / "reference").iterdir()})
    assert len(files[0]) == 2
    assert files[0] == files[1] == files[2]


def test_the_first_step_has_no_margin(file: str, tmp_path: Path) -> None:
    """The model is its own reference: the loss is log 2, and rewards are 0, to rounding."""
    task = model()
    trainer = quiet(tmp_path, max_epochs=1, limit_train_batches=1)
    trainer.fit(task, datamodule=PreferencePairs(file))
    assert trainer.callback_metrics["train/loss_epoch"] == pytest.approx(math.log(2), abs=1e-5)
    assert trainer.callback_metrics["train/rewards/chosen_epoch"] == pytest.approx(0, abs=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
@pytest.mark.parametrize(("ranks", "is_adapted"), [(2, False), (1, True)])
def test_a_run_resumes_bit_for_bit(ranks: int, is_adapted: bool, file: str, tmp_path: Path) -> None:
    """In the middle of an epoch, with adapters too: the reference is that of the start."""
    begun = model(model_type="llama", config=LLAMA) if is_adapted else model()

    def fit(name: str, **settings: Any) -> Tensor:
        def one(engine: ThreadEngine) -> Tensor:
            callbacks: list[Any] = [ModelCheckpoint(save_last=True)]
            callbacks += [LoRA("all-linear")] * is_adapted
            data = PreferencePairs(file, batch_size=1)
            return train(engine, begun, data, tmp_path / name, callbacks=callbacks, **settings)

        torch.manual_seed(3)  # adapters are drawn
        return World(ranks).run(one)[0]

    whole = fit("whole", max_steps=4)
    fit("parts", max_steps=2)
    result = fit("parts", max_steps=4, ckpt_path="last")
    assert torch.equal(result, whole)
    assert not torch.equal(result, fit("short", max_steps=2))


def fitted(file: str, folder: Path, **settings: Any) -> PreferenceModel:
    """Return a model after two steps; the folder has its checkpoint."""
    task = model()
    given: dict[str, Any] = {"max_steps": 2, "callbacks": [ModelCheckpoint(save_last=True)]}
    trainer = quiet(folder, **given | settings)
    trainer.fit(task, datamodule=PreferencePairs(file))
    return task


def resume(file: str, folder: Path, **options: Any) -> None:
    """Resume for a third step, by a new Task."""
    trainer = quiet(folder, max_steps=3, callbacks=[ModelCheckpoint(save_last=True)])
    trainer.fit(model(), datamodule=PreferencePairs(file, **options), ckpt_path="last")


def test_an_evaluation_compares_with_the_starting_model(file: str, tmp_path: Path) -> None:
    """Of a checkpoint, by a new Task: the rewards are those that the fit logged."""
    task = model()
    saves = [ModelCheckpoint(save_last=True)]
    trainer = quiet(tmp_path, max_epochs=1, callbacks=saves, limit_val_batches=None)
    trainer.fit(task, datamodule=PreferencePairs(file))
    logged = trainer.callback_metrics["val/rewards/margins"]
    assert abs(logged) > 1e-3
    again = quiet(tmp_path).validate(model(), datamodule=PreferencePairs(file), ckpt_path="last")
    assert again["val/rewards/margins"] == pytest.approx(logged, rel=1e-6)


def test_without_its_reference_a_run_does_not_resume(file: str, tmp_path: Path) -> None:
    """A table that is not there, or is another start's, and other pairs are refused, with what to
    do.
    """
    fitted(file, tmp_path)
    with pytest.raises(DataError, match="had other pairs, .* Resume with the same data.file"):
        resume(file, tmp_path, max_length=40)
    for path in (tmp_path / "reference").iterdir():
        np.save(path, np.load(path) + 1)
    with pytest.raises(CheckpointError, match="belongs to another start than the checkpoint"):
        resume(file, tmp_path)
    for path in (tmp_path / "reference").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read .* Copy the folder reference of"):
        resume(file, tmp_path)


def test_a_new_start_in_the_folder_has_its_own_reference(file: str, tmp_path: Path) -> None:
    """The earlier run's moves aside with its checkpoints, and resumes there."""
    fitted(file, tmp_path)
    old = {path.name: path.read_bytes() for path in (tmp_path / "reference").iterdir()}
    begun = model()
    with torch.no_grad():
        for parameter in begun.parameters():
            parameter.mul_(2)
    quiet(tmp_path, max_steps=1).fit(begun, datamodule=PreferencePairs(file))
    new = {path.name: path.read_bytes() for path in (tmp_path / "reference").iterdir()}
    assert new.keys() == old.keys()
    assert all(new[name] != old[name] for name in new)
    (before,) = tmp_path.glob("before-*")
    assert {path.name: path.read_bytes() for path in (before / "reference").iterdir()} == old
    resume(file, before)


def test_a_checkpoint_of_another_recipe_is_refused(file: str, tmp_path: Path) -> None:
    """It does not say what its pairs are compared with."""
    fitted(file, tmp_path)

    class Forgets(PreferenceModel):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            super().on_load_checkpoint({})

    task = Forgets(SGD, model_type="gpt2", config=GPT2)
    with pytest.raises(CheckpointError, match="not one of conf=dpo.* init_weights=CHECKPOINT"):
        quiet(tmp_path, max_steps=3).fit(
            task, datamodule=PreferencePairs(file), ckpt_path=str(tmp_path / "checkpoints" / "last")
        )


def test_a_file_is_needed_to_evaluate_a_trained_model(file: str, tmp_path: Path) -> None:
    """The starting model is not there: nothing is compared with the trained one in silence."""
    fitted(file, tmp_path / "run")
    last = str(tmp_path / "run" / "checkpoints" / "last")
    with pytest.raises(CheckpointError, match="cannot be read"):
        quiet(tmp_path / "other").validate(
            model(), datamodule=PreferencePairs(file), ckpt_path=last
        )


def test_dropout_resumes_bit_for_bit(file: str, tmp_path: Path) -> None:
    """Of a folder's model: computing the reference changes no module's mode."""
    model().model.save_pretrained(tmp_path / "base")
    base: Any = {"model_type": None, "config": None, "model": str(tmp_path / "base")}

    def fit(name: str, steps: int, ckpt_path: str | None = None) -> PreferenceModel:
        task = model(**base, disable_dropout=False)
        task.model.transformer.h[0].eval()  # as a user may leave a part of it
        trainer = quiet(
            tmp_path / name, max_steps=steps, callbacks=[ModelCheckpoint(save_last=True)]
        )
        data = PreferencePairs(file, batch_size=4)
        trainer.fit(task, datamodule=data, ckpt_path=ckpt_path)
        return task

    whole = fit("whole", 4)
    fit("parts", 2)
    assert torch.equal(weights(fit("parts", 4, "last")), weights(whole))
    assert whole.model.training and not whole.model.transformer.h[0].attn.training


def test_dropout_is_disabled() -> None:
    """The model's, unless the user wants it."""
    rates = [
        {m.p for m in model(**options).modules() if isinstance(m, nn.Dropout)}
        for options in ({}, {"disable_dropout": False})
    ]
    assert rates == [{0.0}, {0.1}]


def test_the_reference_leaves_modes_as_they_are(file: str, tmp_path: Path) -> None:
    """A part in eval mode stays so, as in a run that resumes and computes none."""
    task = model()
    task.model.transformer.drop.eval()
    quiet(tmp_path, max_steps=1).fit(task, datamodule=PreferencePairs(file))
    resting = [name for name, module in task.named_modules() if not module.training]
    assert resting == ["model.transformer.drop"]


def test_a_folder_of_pairs_as_texts_needs_no_template(tmp_path: Path) -> None:
    """A base model's tokenizer without a chat template reads texts, and refuses messages."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"prompt": "1 + 1 = ", "chosen": f"2{i}", "rejected": "3"} for i in range(12)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = str(tmp_path / "base")
    data = PreferencePairs(str(tmp_path / "texts.jsonl"), tokenizer=base)
    quiet(tmp_path / "run", max_steps=1).fit(model(), datamodule=data)
    with pytest.raises(ConfigError, match="has no chat template"):
        PreferencePairs(None, tokenizer=base).setup("fit")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: model(loss_type="sigmod"),
            ConfigError,
            "task.loss_type is 'sigmod'; .*sigmoid, robust, hinge, ipo. Did you mean 'sigmoid'",
        ),
        (lambda: model(label_smoothing=0.5), ConfigError, "label_smoothing is 0.5; .* below 0.5"),
        (
            lambda: model(loss_type="ipo", label_smoothing=0.1),
            ConfigError,
            "label_smoothing is 0.1, which has no effect with task.loss_type=ipo",
        ),
        (
            lambda: PreferencePairs(None, max_length=4).setup("fit"),
            DataError,
            "has 270 pairs, and none can be trained on: 0 are longer",
        ),
        (
            partial(model().training_step, {"labels": torch.zeros(1, 2, 3)}, 0),
            TaskError,
            "A batch has no reference",
        ),
    ],
)
def test_bad_settings_are_explained(
    make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    """The error names the key, the value, and what is legal."""
    with pytest.raises(error, match=text):
        make()
