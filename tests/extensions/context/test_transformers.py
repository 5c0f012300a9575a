"""Models of transformers on context ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.sft import ChatModel
from tests.extensions.context.ranks_beside import Beside, opened
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.context.pretended import PretendedGroup, pretended_step
from trainkit.extensions.context.sequence import SharedStep, part
from trainkit.extensions.context.transformers import (
    NAME,
    parts_of_rows,
    refusal,
    share_attention,
)

SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
WIDE = {"intermediate_size": 24}


def task_on(ranks: int) -> Any:
    """A Task of a run with so many context ranks."""
    engine = SimpleNamespace(ranks=SimpleNamespace(context_size=ranks))
    return SimpleNamespace(trainer=SimpleNamespace(engine=engine))


def model_of(kind: str, **config: Any) -> Any:
    """A model with random weights, which shares its attention."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **config))
    assert share_attention(task_on(2), made, None) == 2
    return made


def test_a_pretended_rank_leaves_the_model_as_it_was() -> None:
    """Its step shares the model's attention, and sends keys, values and their gradients."""
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL, **WIDE))
    group, before = PretendedGroup(4), made.config._attn_implementation
    with pretended_step(made, group) as step:
        ids_BT, positions_BT = parts_of_rows(torch.arange(16)[None])
        assert ids_BT.shape == (1, 4)
        made(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)
    assert step.attends and SharedStep.open is None
    assert made.config._attn_implementation == before == "sdpa"
    # 2 layers, keys and values of 2 heads with 4 numbers each, for 4 tokens
    assert group.sent == 2 * (4 - 1) * 2 * (2 * 2 * 4 * 4) * 4


@pytest.mark.parametrize(
    ("kind", "config"),
    [("llama", WIDE), ("qwen3", {**WIDE, "head_dim": 4}), ("gpt2", {}), ("olmo2", WIDE)],
)
def test_models_with_positions_and_plain_attention_are_right(
    kind: str, config: dict[str, Any]
) -> None:
    """Their parts give the numbers of the whole, with documents."""
    assert refusal(model_of(kind, **config), 2) is None


@pytest.mark.parametrize(
    ("kind", "config", "text"),
    [
        ("mistral", {**WIDE, "sliding_window": 4}, "has a sliding window of 4 tokens"),
        ("lfm2", {**WIDE, "layer_types": ["conv", "full_attention"]}, "layers of the kind conv"),
        ("bloom", {}, "computes other numbers from parts of a sequence"),
        ("rwkv", {}, "engine.context is 2"),
    ],
)
def test_other_models_are_refused(kind: str, config: dict[str, Any], text: str) -> None:
    """By what they have, or because their numbers are others."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **config))
    try:
        share_attention(task_on(2), made, None)
        why = refusal(made, 2)
    except ConfigError as error:
        why = str(error)
    assert why is not None and why.startswith("engine.context is 2, and ")
    assert text in why and "Set engine.context=1" in why


def test_positions_that_are_not_read_are_seen() -> None:
    """A model whose layers count places of their own computes other numbers."""
    made = model_of("llama", **WIDE)
    rotary = made.model.rotary_emb.forward
    made.model.rotary_emb.forward = lambda x, position_ids: rotary(
        x, torch.arange(x.shape[1])[None].expand(len(x), -1)
    )
    why = refusal(made, 2)
    assert why is not None
    assert "computes other numbers from parts of a sequence than from the whole" in why


def test_the_attention_is_sdpa_outside_of_steps() -> None:
    """Bit for bit, with documents in a row; and without context ranks nothing is changed."""
    made = model_of("llama", **WIDE)
    ids, positions = torch.arange(8)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    own = made(input_ids=ids, position_ids=positions).logits
    assert made.config._attn_implementation == NAME
    made.set_attn_implementation("sdpa")
    assert torch.equal(own, made(input_ids=ids, position_ids=positions).logits)
    assert share_attention(task_on(1), made, "eager") == 1
    assert made.config._attn_implementation == "sdpa"


def test_another_attention_is_refused() -> None:
    """With both settings."""
    made = model_of("llama", **WIDE)
    with pytest.raises(ConfigError, match=r"task.attention is 'eager', and engine.context is 2"):
        share_attention(task_on(2), made, "eager")


def test_a_sliding_window_that_a_part_would_lack_is_refused() -> None:
    """In the step, since it depends on the sequence."""
    made = model_of("mistral", **WIDE, sliding_window=4)
    with opened(Beside(0, 2)), pytest.raises(TaskError, match="a sliding window of 4 tokens"):
        ids, positions = parts_of_rows(torch.arange(8)[None])
        made(input_ids=ids, position_ids=positions)


def test_rows_bring_positions_and_documents() -> None:
    """Positions that begin again name documents; without positions a row is one text."""
    ids = torch.arange(6)[None]
    assert parts_of_rows(ids) == (ids, None)
    with opened(Beside(0, 2)) as step:
        own, places = parts_of_rows(ids, torch.tensor([[0, 1, 2, 0, 1, 2]]))
        assert own.tolist() == [[0, 1, 0, 0]]
        assert places is not None
        assert places.tolist() == [[0, 1, 0, 0]]
        assert step.documents_BT is not None
        assert step.documents_BT.tolist() == [[0, 0, 0, 1, 1, 1]]
    with opened(Beside(1, 2)) as step:
        own, places = parts_of_rows(ids)
        assert places is not None
        assert places.tolist() == [[2, 3, 4, 5]]
        assert step.documents_BT is None
        assert part(ids, fill=0).tolist() == own.tolist() == [[2, 3, 4, 5]]


def test_a_chat_model_that_cannot_be_cut_is_refused_before_training() -> None:
    """In setup."""
    config = {**SMALL, **WIDE, "sliding_window": 4}
    task = ChatModel(torch.optim.SGD, model_type="mistral", config=config)
    task._trainer = task_on(2).trainer
    with pytest.raises(ConfigError, match="engine.context is 2, and MistralForCausalLM"):
        task.setup("fit")
