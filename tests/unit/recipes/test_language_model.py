"""recipes/language_model.py: masked tokens are weighed exactly over ranks,
vocabularies are compared, text is decoded.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from recipes.bert import BERT
from recipes.gpt import GPT, TextBytes
from recipes.gpt2 import GPT2
from recipes.language_model import LanguageModel, MaskedLanguageModel
from recipes.tokens import MaskedTokens, TokenFiles
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.tokenizers import TEXT, train_tokenizer
from tests.helpers.toy import quiet
from trainkit.data.order import SeededDataset, shuffled
from trainkit.errors import ConfigError
from trainkit.extensions.language.token_writer import write_tokens
from trainkit.extensions.language.tokenizer import open_tokenizer

SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """Return a folder of tokens of a trained tokenizer."""
    (tmp_path / "a.txt").write_text(TEXT * 30, encoding="utf-8")
    train_tokenizer(tmp_path / "mine.json")
    return str(write_tokens(tmp_path / "a.txt", tmp_path / "tokens", tmp_path / "mine.json").root)


def weights(task: nn.Module) -> torch.Tensor:
    """Return all weights in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in task.parameters()])


def bert() -> MaskedLanguageModel:
    """Return a tiny BERT without dropout."""
    torch.manual_seed(3)
    return MaskedLanguageModel(BERT(256, 24, 16, 1, 2, dropout=0.0), SGD)


def gpt2(vocab_size: int = 400, context: int = 16) -> LanguageModel:
    """Return a tiny GPT-2."""
    torch.manual_seed(3)
    return LanguageModel(GPT2(vocab_size, context, 16, 1, 2), SGD)


def test_a_step_is_that_of_the_mean_over_its_masked_tokens(tmp_path: Path) -> None:
    """One process, two ranks, and a plain loop over the step's 8 windows end alike:
    the windows' counts of masks differ.
    """
    data = MaskedTokens(context=24)
    data.setup("fit")
    # drawn once: ranks are threads, and share the random numbers
    seeded = SeededDataset(data.train, 0)
    rows = TensorDataset(
        *(torch.stack(part) for part in zip(*(seeded[(0, i)] for i in range(40)), strict=True))
    )
    plain = bert().double()
    begun = copy.deepcopy(plain)

    def train(engine: ThreadEngine, batch_size: int) -> torch.Tensor:
        task, loader = copy.deepcopy(begun), DataLoader(rows, batch_size, shuffle=True)
        options = {
            "precision": "64-true",
            "lr_scaling": "none",
            "enable_checkpointing": False,
            "logger": False,
        }
        options |= {"enable_progress_bar": False, "enable_model_summary": False}
        trainkit.Trainer(engine=engine, max_steps=2, run_dir=str(tmp_path / "run"), **options).fit(
            task, loader
        )
        return weights(task)

    optimizer, counts = SGD(plain.parameters()), set()
    for step in range(2):
        inputs, labels = rows[shuffled(40, 0, 0)[step * 8 : step * 8 + 8]]
        counts |= {int((row != -100).sum()) for row in labels}
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            plain(inputs)[labels != -100], labels[labels != -100]
        ).backward()
        optimizer.step()
    assert len(counts) > 2
    (alone,), pair = (
        World(1).run(partial(train, batch_size=8)),
        World(2).run(partial(train, batch_size=4)),
    )
    for found in (alone, *pair):
        torch.testing.assert_close(found, weights(plain), rtol=0, atol=1e-6)


def test_validation_weighs_masked_tokens(tmp_path: Path) -> None:
    """val/loss and val/acc are means over all masked tokens, whatever the batches;
    a window without any counts nothing.
    """
    task = bert()
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.mul_(20)  # so that windows differ in their loss
    options: dict[str, Any] = {"context": 24, "mask_share": 0.05}
    trainer = [quiet(tmp_path, limit_val_batches=n) for n in (12, 4)]
    values = [
        t.validate(task, datamodule=MaskedTokens(batch_size=size, **options))
        for t, size in zip(trainer, (1, 3), strict=True)
    ]
    assert values[0]["val/loss"] == pytest.approx(values[1]["val/loss"], rel=1e-5)
    assert values[0]["val/acc"] == pytest.approx(values[1]["val/acc"], abs=1e-6)
    nothing = (torch.zeros(2, 24, dtype=torch.int64), torch.full((2, 24), -100))
    assert task._evaluated(nothing)[0] == 0 and task.batch_weight(nothing) == 0


@pytest.mark.parametrize(
    "task", [gpt2(256), LanguageModel(GPT(context=16, width=16, depth=1, heads=2), SGD)]
)
def test_a_vocabulary_too_small_for_the_data_is_named(
    task: LanguageModel, tokens: str, tmp_path: Path
) -> None:
    """The first step would end in an index out of range."""
    with pytest.raises(
        ConfigError,
        match=r"task\.model\.vocab_size is 256; it must be 400 or more, the data's\. Set task",
    ):
        quiet(tmp_path / "run", max_steps=1).fit(
            task, datamodule=TokenFiles(tokens, vocab_size=400, context=16)
        )


def test_data_of_ones_own_needs_no_vocabulary(tokens: str, tmp_path: Path) -> None:
    """Without `vocab_size` nothing is compared; a trial run keeps no tokenizer."""
    numbers = torch.randint(50, (8, 17))
    quiet(tmp_path / "a", max_steps=1).fit(gpt2(50), DataLoader(numbers, 4))
    data = TokenFiles(tokens, vocab_size=400, context=16)
    quiet(tmp_path / "b", fast_dev_run=True).fit(gpt2(400), datamodule=data)
    assert not (tmp_path / "b" / "tokenizer.json").exists()


def test_a_small_gpt_trains_on_tokens_too(tokens: str, tmp_path: Path) -> None:
    """conf=gpt's model takes a vocabulary; and conf=gpt_124m's trains on bytes of a text file."""
    data = TokenFiles(tokens, vocab_size=400, context=16)
    quiet(tmp_path / "a", max_steps=1).fit(
        LanguageModel(GPT(16, 16, 1, 2, vocab_size=400), SGD), datamodule=data
    )
    quiet(tmp_path / "b", max_steps=1).fit(gpt2(256), datamodule=TextBytes(context=16))


def test_a_run_keeps_its_tokenizer_and_decodes(tokens: str, tmp_path: Path) -> None:
    """Text goes in and comes out; a seed repeats it;
    a vocabulary larger than the tokenizer's draws no unknown number.
    """
    task = gpt2(500)
    data = TokenFiles(tokens, vocab_size=400, context=16)
    trainer = quiet(tmp_path / "run", max_steps=1)
    trainer.fit(task, datamodule=data)
    kept = str(tmp_path / "run" / "tokenizer.json")
    words = open_tokenizer(kept)
    with torch.no_grad():
        task.model.tokens.weight[words.vocab_size :] = 0
        task.model.norm.bias.zero_()[0] = 50.0
        task.model.tokens.weight[words.vocab_size :, 0] = 9.0  # the likeliest by far

    def made(**options: Any) -> list[str]:
        return list(task.eval().generate("To be", max_new_tokens=8, tokenizer=kept, **options))

    assert made(seed=1) == made(seed=1) != made(seed=2)
    assert len(made(seed=1)) == 8 and "".join(made(seed=1))
    (begun,) = words.encode(["To be"])
    with torch.no_grad():
        likeliest = int(task(torch.from_numpy(begun)[None])[0, -1, : words.vocab_size].argmax())
    assert made(temperature=0.0)[0] == "".join(words.decode(iter([likeliest])))


def test_the_end_of_a_text_ends_it(tokens: str) -> None:
    """What would come after it is another text."""
    task = gpt2()
    with torch.no_grad():
        task.model.tokens.weight.zero_()[0] = 1.0
        task.model.norm.bias.fill_(9.0)  # token 0, the end, is certain
    assert list(task.eval().generate("To be", tokenizer=f"{tokens}/tokenizer.json")) == []


def test_a_tokenizer_of_another_model_is_refused(tokens: str) -> None:
    """Without one the numbers of tokens would be taken for bytes."""
    with pytest.raises(
        ConfigError, match="The model has 400 tokens, but there is no tokenizer. Give the tokenizer"
    ):
        next(gpt2(400).generate("x"))
    with pytest.raises(
        ConfigError, match=r"The model has 256 tokens, but .*tokenizer\.json has \d+\."
    ):
        next(gpt2(256).generate("x", tokenizer=f"{tokens}/tokenizer.json"))


@pytest.mark.parametrize("of", ["gpt", "gpt2"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_chunks_of_the_loss_change_no_gradient(of: str, z_loss: float, tmp_path: Path) -> None:
    """In float64 two steps lead to the weights of a plain loop with all logits, to 1e-12."""

    def task(**options: Any) -> LanguageModel:
        torch.manual_seed(3)
        model = GPT(16, 16, 1, 2) if of == "gpt" else GPT2(256, 16, 16, 1, 2)
        return LanguageModel(model, SGD, **options)

    rows_BT = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(1))
    made, plain = task(z_loss=z_loss, loss_chunk=10), task().double()
    trainer = quiet(tmp_path, max_steps=2, precision="64-true")
    trainer.fit(made, DataLoader(rows_BT, batch_size=4))
    optimizer = SGD(plain.parameters())
    for text_BT in (rows_BT[:4], rows_BT[4:]):
        logits_NV = plain(text_BT[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits_NV, text_BT[:, 1:].flatten())
        loss = loss + z_loss * logits_NV.logsumexp(-1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for own, expected in zip(made.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    assert ("train/z_loss" in trainer.callback_metrics) == (z_loss > 0)


def test_a_model_without_states_has_no_chunks() -> None:
    """The error names the method."""
    task = LanguageModel(torch.nn.Embedding(256, 256), SGD, loss_chunk=4)
    with pytest.raises(ConfigError, match=r"Embedding has no states\(tokens\)"):
        task.training_step(torch.zeros(1, 5, dtype=torch.int64), 0)
