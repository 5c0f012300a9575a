"""Parameter groups by weight decay: which parameters decay, and which do not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from torch import nn

from trainkit.errors import ConfigError, did_you_mean

ParameterKind = Literal["norm", "bias", "embedding"]
_KINDS = get_args(ParameterKind)
# of class names: BatchNorm2d, LlamaRMSNorm, timm's LayerNormAct2d
_NORM = re.compile(r"norm(act)?(\dd)?$", re.IGNORECASE)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
# Learned positions and tokens that torchvision, timm and transformers hold as bare parameters.
_EMBEDDING_NAMES = (
    "attention_biases",
    "class_token",
    "cls_token",
    "dist_token",
    "mask_token",
    "pos_embed",
    "position_embedding",
    "relative_position_bias_table",
)


def kind_of(module: nn.Module, name: str, parameter: nn.Parameter) -> ParameterKind | None:
    """Return the kind of a parameter that `module` holds under `name`; None for weights of matrices
    and convolutions.

    "bias" is any parameter of that name; "embedding" a table of nn.Embedding, and learned positions
    and class tokens; "norm" a scale: what a layer of a norm holds, by its class name, and any other
    parameter of one dimension.
    """
    if name == "bias" or name.endswith("_bias"):
        return "bias"
    if isinstance(module, _TABLES) or name.startswith(_EMBEDDING_NAMES):
        return "embedding"
    return "norm" if parameter.dim() <= 1 or _NORM.search(type(module).__name__) else None


class ParameterGroups(list[dict[str, Any]]):
    """Groups for an optimizer, and the model whose parameters they have:
    Muon asks it for names and layers.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], model: nn.Module) -> None:
        super().__init__(groups)
        self.model = model


def decay_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    no_weight_decay: Sequence[ParameterKind] = ("norm", "bias"),
) -> ParameterGroups:
    """Return two groups: parameters with weight decay, and those of the kinds that have none.

    By default the weights of matrices, convolutions and embeddings decay, biases and norms do not
    (He et al. 2019, section 3.1). A parameter that several modules share, as a tied embedding, is
    of the kind of the first.

    Args:
        model: the model. Frozen parameters are grouped too: they may be unfrozen later, and an
            optimizer skips parameters without a gradient.
        weight_decay: for the first group; None leaves the optimizer's own.
        no_weight_decay: the kinds without; see `kind_of`. None of them: an empty list.

    Returns:
        Groups for a torch optimizer, the empty ones left out.

    Raises:
        ConfigError: there is no such kind.
    """
    for kind in no_weight_decay:
        if kind not in _KINDS:
            raise ConfigError(
                f"no_weight_decay has '{kind}'; it is a list of {', '.join(_KINDS)}: the kinds of"
                f" parameters that do not decay.{did_you_mean(str(kind), _KINDS)}"
            )
    kinds = kinds_in(model)
    first: dict[str, Any] = {
        "params": [p for p in model.parameters() if kinds[p] not in no_weight_decay]
    }
    if weight_decay is not None:
        first["weight_decay"] = weight_decay
    plain = [p for p in model.parameters() if kinds[p] in no_weight_decay]
    both = (first, {"params": plain, "weight_decay": 0.0})
    return ParameterGroups([group for group in both if group["params"]], model)


def kinds_in(model: nn.Module) -> dict[nn.Parameter, ParameterKind | None]:
    """Return the kind of each parameter; of a shared one, that of the first module."""
    kinds: dict[nn.Parameter, ParameterKind | None] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kinds.setdefault(parameter, kind_of(module, name, parameter))
    return kinds
