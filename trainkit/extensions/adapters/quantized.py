"""Frozen weights of 4 bits beside adapters (QLoRA, Dettmers et al. 2023): the only home of
bitsandbytes (trainkit[bitsandbytes]), which transformers calls while it loads a model.

A layer holds the numbers of its matrix as NF4, in blocks of 64 with a scale each, and the scales in
8 bits: 4.127 bits a weight. It computes with the matrix that these give, in the run's dtype.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Literal

import torch
from torch import nn

from trainkit.errors import ConfigError

Quantization = Literal["nf4"]
_PARAMETER = "Params4bit"  # of bitsandbytes, which need not be imported to ask


def loading_options(quantization: Quantization, model: str | None) -> dict[str, Any]:
    """Return what transformers' `from_pretrained` takes to load a model so.

    Raises:
        ConfigError: bitsandbytes or accelerate is missing, or there is no model to load.
    """
    if model is None:
        raise ConfigError(
            f"task.quantization is '{quantization}', and task.model is null: random weights have"
            " nothing to keep. Give a model, task.model=FOLDER, or leave task.quantization out."
        )
    absent = [name for name in ("bitsandbytes", "accelerate") if not importlib.util.find_spec(name)]
    if absent:
        raise ConfigError(
            f"task.quantization is '{quantization}', which needs {' and '.join(absent)}. Install:"
            " pip install 'trainkit[bitsandbytes]'"
        )
    transformers: Any = importlib.import_module("transformers")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return {"quantization_config": config}


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers whose weights have 4 bits, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module._parameters.get("weight")).__name__ == _PARAMETER
    }


def stay_trainable(model: nn.Module) -> None:
    """Let these layers hold their weights in the one form that gradients pass through.

    On CPUs with bfloat16's instructions bitsandbytes (0.50) packs them otherwise in the first
    forward in eval mode, for good: a later backward then ends there, with a warning alone.
    """
    for layer in quantized_layers(model).values():
        layer.support_avx512bf16_for_cpu = False


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let these layers multiply in a dtype: the run's, in place of float32.

    Raises:
        ConfigError: it is float64, in which bitsandbytes computes no numbers.
    """
    if dtype is torch.float64:
        raise ConfigError(
            "trainer.precision is 64-true, and weights of 4 bits (task.quantization) are computed"
            " with in float32, bf16 or fp16. Set trainer.precision=32-true or bf16-mixed."
        )
    for layer in quantized_layers(model).values():
        layer.compute_dtype, layer.compute_type_is_set = dtype, True


def dequantize(model: nn.Module) -> None:
    """Give layers of 4 bits the plain weights that they compute with, in float32, in place."""
    models: list[Any] = [each for each in model.modules() if hasattr(each, "dequantize")]
    for module in models:
        if quantized_layers(module):
            module.dequantize().float()


def described(model: nn.Module) -> str:
    """Return how many layers have 4 bits, and the bytes of their weights, in a line."""
    layers = quantized_layers(model).values()
    num_weights = sum(layer.in_features * layer.out_features for layer in layers)
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    return (
        f"{len(layers)} layers with {num_weights:,} weights of 4 bits: {size / 2**20:,.1f} MiB in"
        f" place of {4 * num_weights / 2**20:,.1f} (NF4, frozen)"
    )
