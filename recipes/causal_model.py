"""A causal model of transformers, as recipes/sft.py calls it, and what it is tried for before the
first step, since models differ.

logits_of, states_of     its answers, on rows in which documents may stand
has_plain_head           whether the loss may compute its logits a part at a time
keeps_documents_apart    whether documents may share a row
ignores_padding          whether padding needs no mask
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recipes.experts import routers_of
from trainkit.extensions.context.transformers import NAME as CONTEXT
from trainkit.extensions.language.document_masks import rows_of
from trainkit.run.evaluator import evaluating


def logits_of(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    varlen: dict[str, Any] | None = None,
) -> Tensor:
    """Return a model's logits [B, T, V].

    Positions that begin again within a row tell transformers where a document begins, if there is
    neither a mask nor a cache; it then builds the mask that its attention needs, sliding windows
    included.

    Args:
        varlen: the same for flash attention, by the names of VARLEN.
    """
    return _called(model, input_ids, attention_mask, position_ids, varlen).logits


def states_of(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    varlen: dict[str, Any] | None = None,
) -> Tensor:
    """Return what a model's output layer reads, [B, T, D]; see logits_of."""
    base = model.base_model
    return _called(base, input_ids, attention_mask, position_ids, varlen).last_hidden_state


def _called(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    varlen: dict[str, Any] | None,
) -> Any:
    if position_ids is None:
        given: dict[str, Any] = {"attention_mask": attention_mask}
    else:
        given = {"position_ids": position_ids, **(varlen or {})}
    with rows_of(documents=position_ids is not None):
        return model(input_ids=input_ids, use_cache=False, **given)


@contextlib.contextmanager
def _tried(model: Any) -> Iterator[None]:
    """Let a model answer as in evaluation, by attention that any device has: the kernels of GPUs and
    FlexAttention, which is compiled, compute the same.
    """
    own = model.config._attn_implementation
    is_plain = own in (None, "sdpa", "eager", CONTEXT)
    experts = model.config._experts_implementation if routers_of(model) else None
    if not is_plain:
        model.set_attn_implementation("eager")
    if experts:
        # else a token's last digits depend on which others go to its experts
        model.set_experts_implementation("batched_mm")
    try:
        with evaluating(model):
            yield
    finally:
        if not is_plain:
            model.set_attn_implementation(own)
        if experts:
            model.set_experts_implementation(experts)


@torch.no_grad()
def has_plain_head(model: Any) -> bool:
    """Return whether a model's logits are its output layer's, of its last states: it is tried, since
    models scale them, cap them, or read the states of several layers.
    """
    head = model.get_output_embeddings()
    if head is None:
        return False
    device = next(model.parameters()).device
    ids = torch.arange(6, device=device)[None] % model.config.get_text_config().vocab_size
    try:
        with _tried(model):
            own = head(states_of(model, ids))
            logits = logits_of(model, ids)
    except (AttributeError, TypeError, RuntimeError):  # other states, or of another width
        return False
    return torch.equal(own, logits)  # to the bit: a cap bends small logits but little


@torch.no_grad()
def keeps_documents_apart(model: Any) -> bool:
    """Return whether a model's answers to a document are the same whatever stands before it in its
    row, and where it stands: it is tried, since models differ in what they read of positions.
    """
    device = next(model.parameters()).device
    ids = torch.arange(14, device=device) % model.config.get_text_config().vocab_size
    first, other, second = ids[None, :4], ids[None, 4:8], ids[None, 8:]
    positions = torch.cat([torch.arange(4), torch.arange(6)])[None].to(device)
    try:
        with _tried(model):
            after_first, after_other = (
                logits_of(model, torch.cat([before, second], 1), None, positions)[:, 4:]
                for before in (first, other)
            )
            alone = logits_of(model, second)
    except TypeError:  # it takes no positions
        return False
    return _equal(after_first, after_other, alone)


@torch.no_grad()
def ignores_padding(model: Any) -> bool:
    """Return whether a model's answers to a document are the same whatever stands after it in its
    row, without a mask: it is tried. A mask would cost a step two waits for the device, and attention
    its fastest kernel.
    """
    device = next(model.parameters()).device
    ids = torch.arange(14, device=device) % model.config.get_text_config().vocab_size
    text, one, other = ids[None, :6], ids[None, 6:10], ids[None, 10:]
    with _tried(model):
        before_one, before_other = (
            logits_of(model, torch.cat([text, after], 1))[:, :6] for after in (one, other)
        )
        alone = logits_of(model, text)
    return _equal(before_one, before_other, alone)


def _equal(first: Tensor, second: Tensor, alone: Tensor) -> bool:
    # what a mask hides counts exactly nothing; kernels of other sizes round otherwise
    near = torch.allclose(first, alone, rtol=0, atol=1e-2 * float(alone.abs().max()))
    return bool(torch.equal(first, second)) and near
