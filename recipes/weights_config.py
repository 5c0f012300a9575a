"""The config beside weights of transformers, compared with the model that loads them: heads of
attention, for example, change what weights compute, and leave names and shapes as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# What changes a model's answers, and no weight's shape; dropout, for example, is free.
_SETTINGS = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "num_experts_per_tok",
    "norm_topk_prob",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logits_scaling",
    "tie_word_embeddings",
)


def differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], keys: Mapping[str, str]
) -> list[str]:
    """Return a line for each setting that both have, and that differs.

    Args:
        theirs: the content of config.json.
        ours: the same names, for the model that loads the weights.
        keys: name -> the key that sets it here; others cannot be set.
    """
    return [
        f"{name} is {_shown(theirs[name])} in config.json, and {_shown(value)} here"
        + (f"; set {keys[name]}={_shown(theirs[name])}" if name in keys else "")
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]


def _shown(value: Any) -> str:
    """Return a value as it is written in an override."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def differences_of_config(theirs: Mapping[str, Any], ours: Any, key: str) -> list[str]:
    """Return the same for a config of transformers; none if the file's is of another type, whose
    weights have other names.

    Args:
        key: the key of the config's arguments, as task.config.
    """
    if theirs.get("model_type") != ours.model_type:
        return []
    read = type(ours).from_dict(dict(theirs))  # old files, and some kinds, have names of their own
    there, here = (
        {name: getattr(config, name) for name in _SETTINGS if hasattr(config, name)}
        for config in (read, ours)
    )
    return differences(there, here, {name: f"{key}.{name}" for name in here})
