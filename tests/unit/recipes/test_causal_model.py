"""recipes/causal_model.py: what the attention of GPUs computes, and that no step waits for them."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from transformers import masking_utils
from transformers.integrations import flex_attention as integration

from recipes.causal_model import ignores_padding, keeps_documents_apart
from recipes.dpo import PreferenceModel
from recipes.dpo_data import PreferencePairs
from recipes.llama import Llama
from tests.helpers.threads import World
from tests.helpers.toy import quiet
from tests.helpers.waits import Waits, silent
from tests.unit.recipes.test_sft import GPT2, SGD, STEP, chats, file, gpt2, model, one_by_one, train
from trainkit.extensions.language.packing import VARLEN

__all__ = ["file", "one_by_one"]  # fixtures
LAYOUTS = ["packed", "padded", "flat"]


def batch_of(file: str, layout: str) -> dict[str, Any]:
    """Return packs in a layout."""
    data = chats(file)
    data.setup("fit")
    data.used_layout = layout
    return data.collate([data.train[i] for i in range(STEP)])


# -- FlexAttention, which has no backward on a CPU: here by torch's plain form of it, uncompiled ---------


class Plain:
    """FlexAttention on a CPU.

    Attributes:
        masks: of each call, as entries [B, T, T].
        calls: of attention.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masks: list[Tensor] = []
        self.calls = 0
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *each: None)
        monkeypatch.setattr(integration, "compile_friendly_flex_attention", self._attend)
        monkeypatch.setattr(masking_utils, "create_block_mask", self._mask)

    def _attend(self, *inputs: Tensor, training: bool, **options: Any) -> Any:
        self.calls += 1
        return flex_attention.flex_attention(*inputs, **options)

    def _mask(self, **options: Any) -> Any:
        shape = [options[name] for name in ("B", "Q_LEN", "KV_LEN")]
        entries = flex_attention.create_mask(
            options["mask_mod"], shape[0], 1, *shape[1:], device="cpu"
        )
        self.masks.append(entries[:, 0])
        return flex_attention.create_block_mask(**options | {"_compile": False})


@pytest.mark.filterwarnings("ignore")  # torch's own, where it traces
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_attention_computes_what_sdpa_does(
    layout: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 loss and gradients are equal; each entry of a mask is that of its documents.
    Seconds: torch traces its plain form of FlexAttention.
    """
    plain, batch = Plain(monkeypatch), batch_of(file, layout)
    gradients, losses = [], []
    for attention in ("sdpa", "flex_attention"):
        task = model(attention=attention).double()
        task._masks_padding = False
        assert plain.calls == 0
        loss = task._loss(batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in task.parameters()]))
    assert plain.calls == 2
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)
    assert gradients[0].abs().max() > 1e-3
    count = batch["input_ids"].shape[1]
    assert count > 128 or layout == "padded", "a block of FlexAttention; masks are made of several"
    sees = torch.ones(count, count, dtype=torch.bool).tril().expand(len(batch["labels"]), -1, -1)
    if layout != "padded":
        numbers = (batch["position_ids"] == 0).cumsum(1)
        sees = sees & (numbers[:, :, None] == numbers[:, None, :])
    (mask,) = plain.masks
    assert torch.equal(mask, sees)


def test_a_model_is_tried_without_the_kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is on the CPU when it is tried, where its kernels may fail or be compiled for long: it
    answers by plain attention, and has its own again afterwards.
    """
    attend = partial(pytest.fail, "a kernel was called")
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", attend)
    own = model(attention="flex_attention", loss_chunk=50).model
    assert keeps_documents_apart(own)
    assert ignores_padding(own)
    assert own.config._attn_implementation == "flex_attention"
    assert own.training


# -- padding, and the borders of documents ----------------------------------------------------------


class Looking(nn.Module):
    """Answers by a sum over the row: each token sees those after it."""

    training = True

    def __init__(self) -> None:
        super().__init__()
        self.config = model().model.config
        self.table = nn.Embedding(259, 4)

    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        """Return the logits."""
        states = self.table(input_ids)
        return SimpleNamespace(logits=states + states.sum(1, keepdim=True))


def test_a_model_that_sees_padding_is_given_a_mask(file: str, tmp_path: Path) -> None:
    """A causal one is not: what stands after a token does not reach it."""
    assert not ignores_padding(Looking())
    task, data = model(), chats(file, layout="padded")
    given: list[Any] = []
    task.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs["attention_mask"]), with_kwargs=True
    )
    for sees in (False, True):
        task._masks_padding = sees
        task._loss(batch_of(file, "padded"))
    quiet(tmp_path, max_steps=1).fit(task, datamodule=data)
    assert [mask is None for mask in given[:2]] == [True, False]
    assert given[-1] is None


def test_flash_attention_is_given_the_borders_of_documents(
    file: str, one_by_one: Tensor, tmp_path: Path
) -> None:
    """All of a microbatch's documents are in one row; the model gets their borders and the longest. A
    run has the weights of documents one by one, to 1e-12: the borders pass through the loop.
    """
    task, batch = gpt2(), batch_of(file, "flat")
    given: list[Any] = []
    task.model.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs), with_kwargs=True
    )
    task._loss(batch)
    borders = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["labels"].numel()]
    longest = max(end - begin for begin, end in itertools.pairwise(borders))
    for name, right in zip(VARLEN, (borders, borders, longest, longest), strict=True):
        value = given[0][name]
        assert (value.tolist() if isinstance(value, Tensor) else value) == right
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    data = chats(file, layout="padded", batch_size=2)
    data.used_layout = "flat"
    (result,) = World(1).run(lambda engine: train(engine, gpt2(), data, tmp_path))
    torch.testing.assert_close(result, one_by_one, rtol=0, atol=1e-12)


# -- waits for the device -----------------------------------------------------------------------------


@pytest.mark.parametrize("loss_chunk", [None, 50])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_a_chat_model_waits_for_nothing(
    layout: str, loss_chunk: int | None, file: str
) -> None:
    """Forward, backward and weight of a batch."""
    task, batch = silent(model(loss_chunk=loss_chunk)), batch_of(file, layout)
    task._masks_padding = False
    with Waits() as waits:
        task.training_step(batch, 0).backward()
        task.batch_weight(batch)
    assert waits.seen == []


@pytest.mark.parametrize("end", [0, None])
@pytest.mark.parametrize("options", [{}, {"experts": 4}, {"experts": 4, "balance": "bias"}])
def test_a_step_of_a_llama_waits_for_nothing(options: dict[str, Any], end: int | None) -> None:
    """With documents apart or joined, and with experts too."""
    task = Llama(SGD, vocab_size=64, context=32, z_loss=1e-4, **options)
    task._make_model()
    task._end_of_text = end
    batch = torch.randint(64, (3, 33))
    with Waits() as waits:
        silent(task).training_step(batch, 0).backward()
        task.batch_weight(batch)
    assert waits.seen == []


def test_a_step_of_preferences_waits_for_nothing() -> None:
    """A chosen and a rejected answer to each prompt, padded."""
    task = silent(PreferenceModel(SGD, model_type="gpt2", config=GPT2))
    task._masks_padding = False
    data = PreferencePairs()
    data.setup("fit")
    batch = data.collate([data.train[i] for i in range(3)]) | {"reference": torch.zeros(3, 2)}
    with Waits() as waits:
        task.training_step(batch, 0).backward()
    assert waits.seen == []


def test_a_read_value_is_noticed() -> None:
    """What the tests above look for."""
    values = torch.arange(4.0)
    with Waits() as waits:
        values.sum().item()
        values[values > 1]
        bool((values == 1).any())
    assert len(waits.seen) == 3, waits.seen
