"""recipes/sft.py: a step is that of the mean over its answers' tokens, packed or padded, on any
ranks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from recipes.sft import ChatModel, keeps_documents_apart
from recipes.sft_data import Conversations, byte_tokenizer, sums
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.data.order import shuffled
from trainkit.errors import ConfigError, DataError

SGD = partial(torch.optim.SGD, lr=0.5)
LLAMA: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
# without the float32 of Llama's norms, whose rounding depends on the scale of a gradient
GPT2: dict[str, Any] = {
    "vocab_size": 259,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 512,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
STEP = 4  # packs


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file of 40 conversations of very unequal length, of one turn or two."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as lines:
        for number, of in enumerate(sums()[:40]):
            messages = [dict(message) for message in of.messages]
            messages[0]["content"] += " please" * (number * number % 7)
            lines.write(json.dumps({"messages": messages}) + "\n")
    return str(path)


def model(**options: Any) -> ChatModel:
    """Return a tiny Llama."""
    torch.manual_seed(3)
    return ChatModel(SGD, **{"model_type": "llama", "config": LLAMA} | options)


def chats(file: str | None, **options: Any) -> Conversations:
    """Return the conversations, packed into rows of 200 tokens."""
    return Conversations(file, **{"max_length": 200} | options)


def weights(task: nn.Module) -> torch.Tensor:
    """Return all weights in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in task.parameters()])


def train(
    engine: ThreadEngine, begun: ChatModel, data: Conversations, folder: Path, **settings: Any
) -> torch.Tensor:
    """Train a copy on two steps of STEP packs, in float64; return its weights."""
    task = copy.deepcopy(begun)
    given: dict[str, Any] = {"max_steps": 2, "global_batch_size": STEP, "limit_val_batches": 0}
    given |= {"precision": "64-true", "lr_scaling": "none", "engine": engine}
    ckpt_path = settings.pop("ckpt_path", None)
    quiet(folder, **given | settings).fit(task, datamodule=data, ckpt_path=ckpt_path)
    return weights(task)


def gpt2() -> ChatModel:
    """Return a tiny GPT-2 without dropout."""
    return model(model_type="gpt2", config=GPT2)


@pytest.fixture(scope="module")
def one_by_one(file: str) -> torch.Tensor:
    """Return the weights after two steps of a plain loop that computes each document by itself."""
    task, data = gpt2().double(), chats(file)
    data.setup("fit")
    optimizer = SGD(task.parameters())
    order = shuffled(len(data.train), 0, 0)
    for step in range(2):
        packs = [data.train[int(i)] for i in order[step * STEP : (step + 1) * STEP]]
        documents = [document for pack in packs for document in pack]
        assert len(documents) > len(packs)
        total = sum(int((document.labels[1:] >= 0).sum()) for document in documents)
        optimizer.zero_grad()
        for document in documents:
            logits_TV = task.model(document.ids[None]).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits_TV, document.labels[1:], reduction="sum")
            (loss / total).backward()
        optimizer.step()
    return weights(task)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 4), (1, 1), (2, 2), (2, 1)])
def test_packing_changes_no_gradient(
    layout: str, ranks: int, batch_size: int, file: str, one_by_one: torch.Tensor, tmp_path: Path
) -> None:
    """Packed, padded and one by one, on 1 and 2 ranks, with accumulation and without, two steps
    lead to the same weights, to 1e-12.
    """
    begun = gpt2()

    def fit(engine: ThreadEngine) -> torch.Tensor:
        return train(engine, begun, chats(file, layout=layout, batch_size=batch_size), tmp_path)

    for result in World(ranks).run(fit):
        torch.testing.assert_close(result, one_by_one, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_chunks_of_the_loss_change_no_gradient(
    layout: str, file: str, one_by_one: torch.Tensor, tmp_path: Path
) -> None:
    """In float64 two steps lead to the weights of all logits at once, to 1e-12, and the model's own
    forward, which would hold them, is not called.
    """
    begun = model(model_type="gpt2", config=GPT2, loss_chunk=50)
    begun.model.lm_head.register_forward_pre_hook(short_only)

    def fit(engine: ThreadEngine) -> torch.Tensor:
        return train(engine, begun, chats(file, layout=layout, batch_size=4), tmp_path)

    for result in World(1).run(fit):
        torch.testing.assert_close(result, one_by_one, rtol=0, atol=1e-12)


def short_only(module: nn.Module, args: tuple[torch.Tensor]) -> None:
    """Raise if an output layer reads more than 50 tokens."""
    assert args[0].numel() <= 50 * args[0].shape[-1]


def test_without_masks_documents_would_mix(file: str) -> None:
    """Rows whose positions do not begin again have another loss: the comparison above sees it."""
    data = chats(file)
    data.setup("fit")
    batch = data.collate([data.train[i] for i in range(STEP)])
    task = gpt2().double().eval()
    apart = task._loss(batch)
    mixed = task._loss(batch | {"position_ids": torch.arange(batch["labels"].shape[1])[None]})
    assert abs(float((apart - mixed).detach())) > 1e-6


@torch.no_grad()
def test_one_row_for_all_is_the_same_loss(file: str) -> None:
    """The layout of flash attention, which needs a GPU: here by the mask of sdpa."""
    data, task = chats(file), gpt2().double().eval()
    data.setup("fit")
    samples = [data.train[i] for i in range(3)]
    losses = []
    for layout in ("flat", "packed", "padded"):
        data.used_layout = layout
        losses.append(float(task._loss(data.collate(samples))))
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_within_a_packed_epoch(ranks: int, file: str, tmp_path: Path) -> None:
    """On as many ranks bit for bit; on another number the steps have the same packs, and the
    weights differ in the last digits alone.
    """
    begun = model()

    def fit(number: int, name: str, **settings: Any) -> torch.Tensor:
        def one(engine: ThreadEngine) -> torch.Tensor:
            data = chats(file, batch_size=1)
            saves = [ModelCheckpoint(save_last=True)]
            return train(engine, begun, data, tmp_path / name, callbacks=saves, **settings)

        return World(number).run(one)[0]

    whole = fit(2, "whole", max_steps=3)
    fit(2, "parts", max_steps=1)
    result = fit(ranks, "parts", max_steps=3, ckpt_path="last")
    if ranks == 2:
        assert torch.equal(result, whole)
    torch.testing.assert_close(result, whole, rtol=0, atol=1e-12)


def test_what_was_read_and_left_out_is_one_line(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversations, tokens, rows, and each count that is not 0."""
    data = chats(file, max_length=45)
    quiet(tmp_path, max_steps=1).fit(model(), datamodule=data)
    shown = " ".join(capsys.readouterr().out.split())
    held = data.train.documents
    assert f"chats.jsonl: 36, {len(held.tokens):,} tokens" in shown
    assert f"packed into {len(data.train)} rows" in shown
    assert held.num_cut > 0
    assert held.num_silent > 0
    line = f"{held.num_cut} cut at data.max_length; {held.num_silent} left out without a token"
    assert line in shown


def test_validation_weighs_tokens(file: str, tmp_path: Path) -> None:
    """val/loss is the mean over all predicted tokens, whatever the batches and their layout."""
    task = model()
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.mul_(5)  # so that texts differ in their loss
    result = [
        quiet(tmp_path).validate(task, datamodule=chats(file, val_file=file, **options))["val/loss"]
        for options in ({}, {"batch_size": 1, "layout": "padded"}, {"packing": False})
    ]
    assert result == pytest.approx([result[0]] * 3, rel=1e-5)


OPT: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 16,
    "word_embed_proj_dim": 16,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("model_type", "config", "keeps"),
    [
        ("llama", {}, True),
        ("mistral", {"sliding_window": 3}, True),
        ("gemma3_text", {"sliding_window": 3, "head_dim": 8}, True),
        ("opt", None, False),
    ],
)
def test_a_model_is_tried(model_type: str, config: dict[str, Any] | None, keeps: bool) -> None:
    """Whether it keeps documents apart, sliding windows included; one that does not is seen."""
    task = model(model_type=model_type, config=OPT if config is None else LLAMA | config)
    assert keeps_documents_apart(task.model) == keeps
    assert task.model.training


def test_documents_of_a_model_that_mixes_them_are_padded(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is printed once; rows that are asked for are refused."""
    task = model(model_type="opt", config=OPT)
    data = chats(file)
    quiet(tmp_path, max_steps=1).fit(task, datamodule=data)
    assert data.used_layout == "padded"
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("OPTForCausalLM does not keep the documents of a row apart") == 1
    with pytest.raises(ConfigError, match=r"data.layout is 'packed', but OPTForCausalLM"):
        quiet(tmp_path, max_steps=1).fit(task, datamodule=chats(file, layout="packed"))


def test_a_folder_becomes_a_chat_model(file: str, tmp_path: Path) -> None:
    """A fit begins with a folder's weights and tokenizer, and leaves such a folder, which
    transformers' own pipeline talks with.
    """
    model().model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    task = model(model=base, model_type=None, config=None)
    assert torch.equal(weights(task), weights(model()))
    quiet(tmp_path / "run", max_steps=1).fit(task, datamodule=chats(file, tokenizer=base))
    folder = str(tmp_path / "run" / "pretrained")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(weights(theirs), weights(task))
    talk = transformers.pipeline("text-generation", folder)
    (answer,) = talk([{"role": "user", "content": "1 + 1 = ?"}], max_new_tokens=3)
    assert answer["generated_text"][-1]["role"] == "assistant"


def test_the_folder_of_a_fit_ends_where_its_template_ends_an_answer(
    file: str, tmp_path: Path
) -> None:
    """As `trainkit generate` and `trainkit export` do: beside the base model's own end of a text,
    that of the chat tokenizer's.
    """
    task = model(config=LLAMA | {"eos_token_id": 0})
    quiet(tmp_path, max_steps=1).fit(task, datamodule=chats(file))
    folder = str(tmp_path / "pretrained")
    end = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == [0, end]
    assert task.text_source(folder).stops(is_chat=True) == {0, end}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: model(attention="spda"), ConfigError, "task.attention is 'spda'.*mean 'sdpa'"),
        (lambda: model(revision="main"), ConfigError, "task.revision is 'main', but task.model is"),
        (lambda: model(model="."), ConfigError, "give the folder of a model"),
        (
            lambda: model(model_type="gemma2", config=LLAMA | {"head_dim": 8}, loss_chunk=9),
            ConfigError,
            "task.loss_chunk is 9, but the logits of Gemma2ForCausalLM are not its output layer's",
        ),
        (
            lambda: model(model="./nowhere", model_type=None, config=None),
            ConfigError,
            "task.model is './nowhere', and no model can be loaded",
        ),
        (lambda: chats(None, tokenizer="."), ConfigError, "data.tokenizer is '.', and no"),
        (lambda: chats(None, max_length=4).setup("fit"), DataError, "none can be trained on: 0 "),
    ],
)
def test_bad_settings_are_explained(
    make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    """The error names the key, the value, and what is legal."""
    with pytest.raises(error, match=text):
        make()


def test_a_tokenizer_of_another_model_is_refused(file: str, tmp_path: Path) -> None:
    """Its numbers would be outside the model's table in the first step."""
    task = model(config=LLAMA | {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2})
    with pytest.raises(
        ConfigError, match="has 259 tokens and the model 100: it belongs to another"
    ):
        quiet(tmp_path, max_steps=1).fit(task, datamodule=chats(file))
