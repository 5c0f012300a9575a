"""recipes/token_mixture.py: folders of tokens by weights, the same steps on any ranks; and mixtures
that cannot be, explained.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import pytest
import torch
from torch import Tensor

import trainkit
from recipes.token_mixture import TokenMixture
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.tokenizers import TEXT, train_tokenizer
from tests.helpers.toy import quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.token_writer import write_tokens

CONTEXT, STEP = 16, 4
WEIGHTS = [0.75, 0.25]


@pytest.fixture
def roots(tmp_path: Path) -> list[str]:
    """Return a long folder of small letters, and a short one of capitals."""
    made = []
    draw = random.Random(0)
    for letter, letters, length in (("a", ascii_lowercase, 2000), ("b", ascii_uppercase, 360)):
        text = tmp_path / f"{letter}.txt"
        text.write_text("".join(draw.choices(letters, k=length)))
        made.append(str(write_tokens(text, tmp_path / f"of-{letter}").root))
    return made


class Reader(trainkit.Task):
    """Notes the letters of each step, as its weights move by them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(256, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return -self.weight[batch].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=float(STEP), momentum=0.5)


def fit(roots: list[str], folder: Path, ranks: int, **settings: Any) -> Tensor:
    """Train; return the weights, which depend on what was read in which step."""
    ckpt_path = settings.pop("ckpt_path", None)

    def one(engine: ThreadEngine) -> Tensor:
        data = TokenMixture(roots, WEIGHTS, batch_size=1, context=CONTEXT, epoch_size=28)
        given: dict[str, Any] = {"global_batch_size": STEP, "limit_val_batches": 0}
        given |= {"lr_scaling": "none", "callbacks": [ModelCheckpoint(save_last=True)]}
        task = Reader()
        trainer = quiet(folder, **given | {"engine": engine} | settings)
        trainer.fit(task, datamodule=data, ckpt_path=ckpt_path)
        return task.weight.detach()

    return World(ranks).run(one)[0]


def test_each_step_has_its_shares(roots: list[str]) -> None:
    """Of each four windows three are of the folder with three quarters of the weight, though the
    other has as many epochs as it needs; validation reads all that is held out.
    """
    data = TokenMixture(roots, WEIGHTS, batch_size=4, context=CONTEXT, epoch_size=240)
    data.setup("fit")
    order = data.mixture.order_of(0, 0)
    letters = "".join(chr(int(data.train[index][0])) for index in order)
    assert len(letters) == 240
    assert all(sum(map(str.islower, letters[at : at + 4])) == 3 for at in range(0, 240, 4))
    assert next(iter(data.train_dataloader())).shape == (4, CONTEXT + 1)
    assert len(data.val) == sum(len(part) for part in data.val.datasets)
    assert len(TokenMixture(roots, WEIGHTS, context=CONTEXT).roots) == 2


def by_hand(roots: list[str]) -> Tensor:
    """Return the weights after two epochs of a plain loop over the mixture's order."""
    data = TokenMixture(roots, WEIGHTS, context=CONTEXT, epoch_size=28)
    data.setup("fit")
    task = Reader()
    optimizer = task.configure_optimizers()
    for epoch in range(2):
        order = data.mixture.order_of(0, epoch)
        for first in range(0, 28, STEP):
            batch = torch.stack([data.train[index] for index in order[first : first + STEP]])
            optimizer.zero_grad()
            task.training_step(batch, 0).backward()
            optimizer.step()
    return task.weight.detach()


def test_any_ranks_read_the_same(roots: list[str], tmp_path: Path) -> None:
    """1, 2 and 4 ranks read the mixture's order, over more than an epoch; and so does a run that is
    resumed within the second epoch, on another number of ranks.
    """
    whole = by_hand(roots)
    for ranks in (1, 2, 4):
        other = fit(roots, tmp_path / str(ranks), ranks, max_epochs=2)
        torch.testing.assert_close(other, whole, rtol=0, atol=1e-12)
    fit(roots, tmp_path / "parts", 2, max_epochs=2, max_steps=9)
    rest = fit(roots, tmp_path / "parts", 1, max_epochs=2, ckpt_path="last")
    torch.testing.assert_close(rest, whole, rtol=0, atol=1e-12)


def test_another_seed_reads_another_order(roots: list[str]) -> None:
    """As does each epoch: windows of one folder come in an order of their own."""
    data = TokenMixture(roots, WEIGHTS, context=CONTEXT, epoch_size=40)
    data.setup("fit")
    orders = [data.mixture.order_of(seed, epoch)[:] for seed, epoch in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(order) for order in orders}) == 3


def test_shares_and_passes_are_printed_once(
    roots: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names each folder, its share, its tokens and how often an epoch reads it."""
    fit(roots, tmp_path, 1, max_steps=1)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("mixture") == 1
    assert "an epoch of 28 windows:" in shown
    assert "of-a 75.0% of 1,801 tokens, 0.186 passes;" in shown
    assert "of-b 25.0% of 325 tokens, 0.333 passes" in shown


BAD: dict[str, tuple[Callable[[list[str]], Any], type[Exception], str]] = {
    "nothing": (
        lambda roots: TokenMixture(roots, [0, 0.0]),
        ConfigError,
        r"data\.weights is \[0, 0\.0\], which sums to nothing: no folder would be read\. Give",
    ),
    "negative": (
        lambda roots: TokenMixture(roots, [1, -0.5]),
        ConfigError,
        r"data\.weights is \[1, -0\.5\]; each must be a number, 0 or more",
    ),
    "nan": (
        lambda roots: TokenMixture(roots, [1, float("nan")]),
        ConfigError,
        r"each must be a number, 0 or more",
    ),
    "other length": (
        lambda roots: TokenMixture(roots, [1]),
        ConfigError,
        r"data\.roots has 2 folders and data\.weights 1 numbers; give a weight for each",
    ),
    "none": (lambda roots: TokenMixture([], []), ConfigError, r"data\.roots has 0 folders"),
    "twice": (
        lambda roots: TokenMixture([roots[0], f"{roots[0]}/"], [1, 1]),
        ConfigError,
        r"with a folder twice\. Name each once, with a larger weight",
    ),
    "unknown": (
        lambda roots: TokenMixture([roots[0], "nowhere"], [1, 1]),
        DataError,
        r"nowhere is no folder of tokens: .*python -m trainkit data tokens",
    ),
    "short": (
        lambda roots: TokenMixture(roots, [1, 1], context=200),
        DataError,
        r"of-a of data\.roots: its val part has 200 tokens, too few for a window of",
    ),
    "vocabulary": (
        lambda roots: TokenMixture(roots, [1, 1], vocab_size=100, context=CONTEXT),
        ConfigError,
        r"data\.vocab_size is 100; it must be 256 or more",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mixture_that_cannot_be_is_explained(name: str, roots: list[str]) -> None:
    """The error names the key, the value, and what to do."""
    make, kind, said = BAD[name]
    with pytest.raises(kind, match=said):
        make(roots).setup("fit")


def test_folders_of_different_tokenizers_are_refused(roots: list[str], tmp_path: Path) -> None:
    """Of another vocabulary, or of as many tokens that mean something else; a copy of a tokenizer
    is the same one, and goes into the run.
    """
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20, encoding="utf-8")
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", ("<|endoftext|>",))
    own = write_tokens(text, tmp_path / "own", tokenizer)
    alike = write_tokens(text, tmp_path / "alike", tokenizer)
    options: dict[str, Any] = {"vocab_size": 1000, "context": CONTEXT}
    data = TokenMixture([str(own.root), str(alike.root)], [1, 1], **options)
    data.setup("fit")
    assert data.tokenizer == own.tokenizer
    with pytest.raises(ConfigError, match=r"own with a vocabulary of \d+ and .*of-a with one of"):
        TokenMixture([str(own.root), roots[0]], [1, 1], **options).setup("fit")
    changed = (alike.root / "tokenizer.json").read_text()
    (alike.root / "tokenizer.json").write_text(changed + "\n")
    with pytest.raises(ConfigError, match="of different tokenizers: a number would not mean"):
        TokenMixture([str(own.root), str(alike.root)], [1, 1], **options).setup("fit")
