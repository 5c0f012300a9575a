"""recipes/llama.py: published shapes, documents that do not mix, the same steps on any ranks."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import trainkit
from recipes.gpt import TextBytes
from recipes.llama import SIZES, Llama, make_llama
from recipes.tokens import TokenFiles
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.data.order import shuffled
from trainkit.errors import ConfigError
from trainkit.extensions.language.sampling import Ask, begin, continue_all

SGD = partial(torch.optim.SGD, lr=0.5)
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
CONTEXT, STEP, END = 32, 4, 0xFF
# The vocabulary of the source, and the weights: from 1b on those of the published files; of the three
# small ones the arithmetic of their shapes.
PUBLISHED = {
    "60m": (32_000, 58_073_600),
    "130m": (32_000, 134_105_856),
    "350m": (32_000, 367_969_280),
    "1b": (128_256, 1_235_814_400),
    "3b": (128_256, 3_212_749_824),
    "7b": (32_000, 6_738_415_616),
    "8b": (128_256, 8_030_261_248),
}


def llama(**options: Any) -> Llama:
    """Return a task with a tiny model, made."""
    torch.manual_seed(3)
    task = Llama(SGD, context=CONTEXT, config=SMALL, **options)
    task._make_model()
    return task


def tokens(root: str, **options: Any) -> TokenFiles:
    """Return the rows of the folder."""
    return TokenFiles(root, **{"context": CONTEXT, "batch_size": 2} | options)


def weights(task: nn.Module) -> Tensor:
    """Return all weights in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in task.parameters()])


def fit(
    begun: Llama, data: Any, folder: Path, engine: ThreadEngine | None = None, **settings: Any
) -> Tensor:
    """Train a copy on two steps of STEP rows, in float64; return its weights."""
    task = copy.deepcopy(begun)
    given: dict[str, Any] = {"max_steps": 2, "global_batch_size": STEP, "limit_val_batches": 0}
    given |= {"precision": "64-true", "lr_scaling": "none"}
    given |= {} if engine is None else {"engine": engine}
    ckpt_path = settings.pop("ckpt_path", None)
    quiet(folder, **given | settings).fit(task, datamodule=data, ckpt_path=ckpt_path)
    return weights(task)


@pytest.fixture
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers compute norms in the precision of their input, in place of float32."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)


def documents_of_row(row: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and next tokens of each document that a row has a part of, by a loop."""
    found, begun = [], 0
    for place in range(CONTEXT):
        if row[place] == END or place == CONTEXT - 1:
            is_end = int(row[place] == END)
            inputs, labels = row[begun : place + 1], row[begun + 1 : place + 2]
            if len(labels) > is_end:
                found.append((inputs[: len(labels) - is_end], labels[: len(labels) - is_end]))
            begun = place + 1
    return found


def one_by_one(begun: Llama, root: str, z_loss: float) -> Tensor:
    """Return the weights after two steps that compute each document by itself, with plain losses."""
    task, data = copy.deepcopy(begun).double(), tokens(root)
    data.setup("fit")
    optimizer = SGD(task.parameters())
    order = shuffled(len(data.train), 0, 0)
    for step in range(2):
        rows = [data.train[int(i)] for i in order[step * STEP : (step + 1) * STEP]]
        documents = [document for row in rows for document in documents_of_row(row)]
        assert len(documents) > 2 * len(rows)
        total = sum(len(labels) for _, labels in documents)
        optimizer.zero_grad()
        for inputs, labels in documents:
            logits = task.model(inputs[None]).logits[0]
            loss = functional.cross_entropy(logits, labels, reduction="sum")
            loss = loss + z_loss * logits.logsumexp(-1).square().sum()
            (loss / total).backward()
        optimizer.step()
    return weights(task)


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_size_has_the_weights_of_its_source(size: Any) -> None:
    """With the vocabulary of its source."""
    vocab_size, number = PUBLISHED[size]
    sizes = get_args(get_type_hints(Llama.__init__)["size"])  # what a config may name
    with torch.device("meta"):
        model = make_llama(size, vocab_size, 2048)
    assert sum(p.numel() for p in model.parameters()) == number
    assert {*PUBLISHED, "tiny"} == {*SIZES} == {*sizes}


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 4), (1, 1), (2, 2), (2, 1)])
def test_rows_are_their_documents(
    ranks: int, batch_size: int, z_loss: float, root: str, tmp_path: Path
) -> None:
    """On 1 and 2 ranks, with accumulation and without, with a loss in chunks, two steps lead to the
    weights of a loop over documents, to 1e-12; so no document's first token is predicted by another.
    """
    begun = llama(z_loss=z_loss, loss_chunk=10)
    expected = one_by_one(begun, root, z_loss)

    def one(engine: ThreadEngine) -> Tensor:
        return fit(begun, tokens(root, batch_size=batch_size), tmp_path, engine)

    for result in World(ranks).run(one):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_joined_rows_are_transformers_own_loss(root: str) -> None:
    """With documents=joined a row is one text, and each token but the first is predicted; another
    loss than that of documents apart.
    """
    data = tokens(root)
    data.setup("fit")
    batch = torch.stack([data.train[i] for i in range(STEP)])
    task = llama(documents="joined").double().eval()
    with torch.no_grad():
        theirs = task.model(input_ids=batch, labels=batch).loss
        joined = task._loss(batch)
        task._end_of_text = END
        apart = task._loss(batch)
    torch.testing.assert_close(
        joined.float(), theirs, rtol=1e-6, atol=0
    )  # transformers' is in float32
    assert abs(float(joined - apart)) > 1e-4
    assert int(task.batch_weight(batch)) == int((batch[:, :-1] != END).sum()) < batch[:, 1:].numel()


def test_documents_are_apart_if_the_data_can_tell(root: str, tmp_path: Path) -> None:
    """auto: apart with an end of a text, joined without one, where apart is refused."""
    (tmp_path / "a.txt").write_text("one two three " * 99)
    text = TextBytes(file=str(tmp_path / "a.txt"), context=CONTEXT, batch_size=2)
    for data, options, expected in (
        (tokens(root), {}, END),
        (tokens(root), {"documents": "joined"}, None),
        (text, {}, None),
    ):
        task = llama(**options)
        quiet(tmp_path / "run", max_steps=1).fit(task, datamodule=data)
        assert task._end_of_text == expected
    with pytest.raises(
        ConfigError, match=r"task\.documents is 'apart', but TextBytes has no token"
    ):
        quiet(tmp_path / "run", max_steps=1).fit(llama(documents="apart"), datamodule=text)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_on_any_ranks(ranks: int, root: str, tmp_path: Path) -> None:
    """On as many ranks bit for bit; on another number to the last digits."""
    begun = llama()

    def run(number: int, name: str, **settings: Any) -> Tensor:
        def one(engine: ThreadEngine) -> Tensor:
            saves = [ModelCheckpoint(save_last=True)]
            data = tokens(root, batch_size=1)
            return fit(begun, data, tmp_path / name, engine, callbacks=saves, **settings)

        return World(number).run(one)[0]

    whole = run(2, "whole", max_steps=3)
    run(2, "parts", max_steps=1)
    result = run(ranks, "parts", max_steps=3, ckpt_path="last")
    if ranks == 2:
        assert torch.equal(result, whole)
    torch.testing.assert_close(result, whole, rtol=0, atol=1e-7)  # norms are in float32


def test_an_export_is_opened_by_transformers(tmp_path: Path) -> None:
    """`from_pretrained` of the exported folder gives equal logits, with a tied head too; and it is
    a folder to begin from.
    """
    for tied in (False, True):
        task = llama(z_loss=1e-4)
        if tied:
            task = Llama(SGD, context=CONTEXT, config=SMALL | {"tie_word_embeddings": True})
            task._make_model()
        folder = tmp_path / str(tied)
        trainkit.export(task.eval(), folder, format="huggingface")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        batch = torch.arange(2 * CONTEXT).view(2, CONTEXT)
        with torch.no_grad():
            assert torch.equal(theirs(input_ids=batch).logits, task(batch))
        other = llama() if not tied else copy.deepcopy(task)
        nn.init.zeros_(other.model.model.embed_tokens.weight)
        given = other.translate_weights(read_weights(str(folder)))
        assert load_into(other, given, str(folder)) == []
        assert torch.equal(weights(other), weights(task))
        config = json.loads((folder / "config.json").read_text())
        assert other.compare_config(config) == []
        turned = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
        (line,) = other.compare_config(turned)
        assert "rope_theta: 7.0" in line and "set task.config.rope_parameters={" in line


def test_it_generates() -> None:
    """By its own bytes, the same for a seed."""
    task = llama().eval()
    made = ["".join(task.generate("on", 8, seed=1)) for _ in range(2)]
    assert made[0] == made[1]
    assert len([*task.generate("on", 8, temperature=0)]) <= 8


def test_a_cache_makes_the_text_of_whole_windows() -> None:
    """Within the model's context, and beyond it, where the first tokens are no longer seen."""
    task = llama().eval()
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.mul_(2)
    context, source = task.model.context, task.text_source()
    together = [begin(source, Ask(text, context, temperature=0)) for text in ("on", "another")]
    for _ in continue_all(source, together):
        pass
    assert max(len(one.ids) for one in together) > context
    for one in together:
        ids = one.ids[: one.num_prompt]
        while len(ids) < len(one.ids):
            ids.append(int(task(torch.tensor([ids[-context:]]))[0, -1].argmax()))
        assert one.ids == ids


def test_the_z_loss_is_logged_beside_the_loss(root: str, tmp_path: Path) -> None:
    """train/loss stays the cross-entropy, so that runs with another z-loss compare."""
    logged = []
    for z_loss in (0.0, 1.0):
        task = llama(z_loss=z_loss)
        trainer = quiet(tmp_path, max_steps=1)
        trainer.fit(task, datamodule=tokens(root))
        logged.append(trainer.callback_metrics)
    assert logged[0]["train/loss"] == logged[1]["train/loss"]
    assert "train/z_loss" not in logged[0]
    assert 20 < float(logged[1]["train/z_loss"]) < 50  # log^2 256 is 31


def test_wrong_settings_are_explained() -> None:
    """An unknown size, a setting that LlamaConfig lacks; and ranks that do not divide the heads."""
    with pytest.raises(ConfigError, match=r"task\.size is '2b'; it must be one of tiny, 60m, .*8b"):
        make_llama("2b", 256, 32)
    with pytest.raises(
        ConfigError, match=r"task\.config\.hiden_size is not a setting.*hidden_size"
    ):
        make_llama("tiny", 256, 32, {"hiden_size": 8})
    mesh = type("Mesh", (), {"size": lambda self: 2})()
    with pytest.raises(ConfigError, match=r"it must divide task\.config\.num_key_value_heads=1"):
        llama().parallelize(mesh)


def test_attention_is_the_users_choice(root: str) -> None:
    """eager and sdpa keep documents apart alike."""
    data = tokens(root)
    data.setup("fit")
    batch = torch.stack([data.train[i] for i in range(STEP)])
    losses = []
    for attention in ("sdpa", "eager"):
        task = llama(attention=attention).eval()
        assert task.model.config._attn_implementation == attention
        task._end_of_text = END
        with torch.no_grad():
            losses.append(float(task._loss(batch)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
