"""Context ranks for models of transformers: its registry of attentions gets one more, which asks
`attention` (sequence.py) in a step that has taken its part, and is `sdpa` elsewhere.

    share_attention    a model computes its attention so, if there are context ranks
    parts_of_rows      this rank's tokens and positions, of rows in which documents may stand
    refusal            why a model cannot: it is tried
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.device.shards import is_spread
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.context.parts import (
    attend_before,
    documents_of_positions,
    joined,
    part_of,
)
from trainkit.extensions.context.sequence import SharedStep, attention, part
from trainkit.run.evaluator import evaluating

NAME = "context"  # as attn_implementation
_TRIED = 2, 16  # ranks and tokens


def share_attention(task: Any, model: Any, chosen: str | None) -> int:
    """Let a model of transformers compute attention with the keys of all context ranks; without
    them, and without a run, it stays as it is.

    Args:
        task: the model's.
        chosen: task.attention.

    Returns:
        engine.context.

    Raises:
        ConfigError: another attention was chosen, or the model takes none but its own.
    """
    try:
        ranks: int = task.trainer.engine.ranks.context_size
    except TaskError:  # an export builds the Task without a run
        return 1
    if ranks == 1:
        return 1
    if chosen not in (None, "sdpa"):
        raise ConfigError(
            f"task.attention is '{chosen}', and engine.context is {ranks}, whose attention gathers"
            " keys of other ranks and is computed by torch's sdpa. Set task.attention=null, or"
            " engine.context=1."
        )

    set_attention(model, ranks)
    return ranks


def set_attention(model: Any, ranks: int) -> None:
    """Let a model of transformers compute this attention.

    Args:
        ranks: engine.context.

    Raises:
        ConfigError: its class takes no attention by name.
    """
    import transformers
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **kwargs) if _cut_step() is None else None

    transformers.AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, mask)
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise ConfigError(
            f"engine.context is {ranks}, and {type(model).__name__} takes no other attention than its"
            " own. Set engine.context=1, or take another model."
        ) from error


def parts_of_rows(
    ids_BT: Tensor, positions_BT: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's tokens and their positions; on one process what is given.

    Args:
        ids_BT: of whole rows.
        positions_BT: they begin again at each document of a row, which sees no other one; None: a
            row is one document.
    """
    step = SharedStep.open
    if step is None:
        return ids_BT, positions_BT
    if positions_BT is None:
        step.documents_BT = None
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    else:
        step.documents_BT = documents_of_positions(positions_BT)
    return part(ids_BT, fill=0), part(positions_BT, fill=0)


def _cut_step() -> SharedStep | None:
    step = SharedStep.open
    return None if step is None or step.length is None else step


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention in the form of transformers: [B, T, H, K], and no weights."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    step = _cut_step()
    if step is None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
        return whole
    window = others.get("sliding_window")
    if window is not None and window < (step.length or 0):
        raise TaskError(
            f"engine.context is {step.group.ranks}, and {type(module).__name__} has a sliding window"
            f" of {window} tokens in a sequence of {step.length}, which parts of a sequence do not"
            " have. Set engine.context=1."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(step, _Trial):
        own = step.attend(query, key, value, scaling)
    else:
        own = attention(
            query,
            key,
            value,
            attention_mask,
            dropout,
            causal,
            documents_BT=step.documents_BT,
            scale=scaling,
        )
    return own.transpose(1, 2).contiguous(), None


# -- is it right for this model? --------------------------------------------------------------------------------------


class _OnePlace:
    """Stands for ranks that this process computes one beside the other."""

    place = 0
    ranks = _TRIED[0]


class _Trial(SharedStep):
    """The parts of all ranks as rows of one batch: the first rows are the first rank's."""

    def __init__(self) -> None:
        group: Any = _OnePlace()
        super().__init__(group, "trial")
        self.length = self.size = _TRIED[1]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return the attention of all ranks."""
        ranks = self.group.ranks
        self.attends = True
        keys, values = (joined(each.chunk(ranks), 2) for each in (key, value))
        options: dict[str, Any] = {"scale": scale, "enable_gqa": key.shape[1] != query.shape[1]}
        return torch.cat(
            [
                attend_before((place, ranks), own, keys, values, self.documents_BT, **options)
                for place, own in enumerate(query.chunk(ranks))
            ]
        )


@torch.no_grad()
def refusal(model: Any, ranks: int) -> str | None:
    """Return why parts of a sequence are not computed as the whole, None if they are. It is tried:
    models differ in what they read of positions, and some layers see other tokens without
    attention. Call it outside of steps, after `share_attention`.

    Args:
        model: causal, of transformers.
        ranks: engine.context.
    """
    if any(is_spread(parameter) for parameter in model.parameters()):
        return None  # an earlier stage of this process has tried it
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    begin = f"engine.context is {ranks}, and {type(model).__name__}"
    if kinds:
        return f"{begin} has layers of the kind {min(kinds)}. Set engine.context=1."
    device = next(model.parameters()).device
    count, tokens = _TRIED
    ids_BT = torch.arange(1, tokens + 1, device=device)[None] % config.vocab_size
    positions_BT = torch.cat([torch.arange(5), torch.arange(tokens - 5)])[None].to(device)
    step = _Trial()
    step.documents_BT = documents_of_positions(positions_BT)
    rows = [
        torch.cat([part_of(each, 1, place, count) for place in range(count)])
        for each in (ids_BT, positions_BT)
    ]
    try:
        with evaluating(model):
            whole = model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False).logits
            SharedStep.open = step
            parts = model(input_ids=rows[0], position_ids=rows[1], use_cache=False).logits
    except (TypeError, TaskError, RuntimeError) as error:
        return f"{begin} cannot compute parts of a sequence ({error}). Set engine.context=1."
    finally:
        SharedStep.open = None
    near = torch.allclose(
        joined(parts.chunk(count), 1), whole, rtol=0, atol=1e-3 * float(whole.abs().max())
    )
    if step.attends and near:
        return None
    return (
        f"{begin} computes other numbers from parts of a sequence than from the whole: it has"
        " layers or positions of its own kind. Set engine.context=1, or take another model."
    )
