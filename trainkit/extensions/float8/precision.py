"""bf16-mixed whose large linear layers multiply in float8. The only home of torchao."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections import Counter

import torch
from torch import Tensor, nn

from trainkit.device.precision import Precision
from trainkit.errors import ConfigError

# A product in float8 takes rows of this many numbers.
_MULTIPLE = 16
# The first GPUs that have one (Ada); Hopper has 9.0.
_CAPABILITY = (8, 9)


class Float8Precision(Precision):
    """Forward under bfloat16's autocast; linear layers multiply in float8 (E4M3).

    Weights, checkpoints and optimizers stay float32. Each row of a product's factors has a scale of
    its own, the power of two below 448 / its largest magnitude, and gradients of weights are
    computed in bfloat16 (torchao's recipe rowwise_with_gw_hp, after Micikevicius et al. 2022, "FP8
    formats for deep learning"). So a sample's numbers do not depend on the samples beside it: any number of ranks and
    microbatches trains the same up to rounding, where one scale for a whole tensor, which is faster,
    differs by float8's own error.

    Attributes:
        imitates: compute what float8 gives in float32, on any device. For tests.
    """

    imitates = False

    def __init__(self, name: str, device: torch.device) -> None:
        """Build for a device.

        Raises:
            ConfigError: the device has no products in float8, or torchao is missing.
        """
        super().__init__("bf16-mixed", device)
        self.name = name
        if not self.imitates:
            _refuse_device(device)
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                f"trainer.precision is '{name}', and the package torchao is not installed:"
                " pip install 'trainkit[fp8]'. Or use trainer.precision=bf16-mixed."
            )

    def convert(self, model: nn.Module) -> None:
        """Replace linear layers, in place; each keeps its Parameters and their names.

        Raises:
            ConfigError: there is none that can multiply in float8.
        """
        float8 = importlib.import_module("torchao.float8")
        converted = importlib.import_module("torchao.float8.float8_linear").Float8Linear
        shared = _shared(model)
        reasons = {
            name: _why_not(module, shared)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not isinstance(module, converted)
        }
        already = sum(isinstance(module, converted) for module in model.modules())
        chosen = {name for name, reason in reasons.items() if not reason}
        if not chosen and not already:
            raise ConfigError(_nothing_to_convert(self.name, reasons))
        recipe = float8.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
        float8.convert_to_float8_training(
            model,
            config=dataclasses.replace(recipe, emulate=self.imitates),
            module_filter_fn=lambda module, name: name in chosen,
        )
        if self.imitates:
            for name in chosen:
                model.get_submodule(name).register_forward_pre_hook(_as_on_a_gpu)
        left = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
        count = already + len(chosen)
        self.note = f"{count} of {count + len(left)} linear layers in float8"
        if left:
            self.note += f"; not {', '.join(left[:3])}{', ...' * (len(left) > 3)}"


def _refuse_device(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < _CAPABILITY:
        has = (
            f"engine.device is {device.type}"
            if capability is None
            else f"{torch.cuda.get_device_name(device)} has compute capability"
            f" {'.'.join(map(str, capability))}"
        )
        raise ConfigError(
            f"trainer.precision is 'fp8-mixed', and {has}: products in float8 need an NVIDIA GPU of"
            f" compute capability {'.'.join(map(str, _CAPABILITY))} or newer (L4, L40S, H100, H200,"
            " B200). Use trainer.precision=bf16-mixed."
        )


def _shared(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that several modules have, as of an embedding tied to a head."""
    counts = Counter(
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    return {parameter for parameter, count in counts.items() if count > 1}


def _why_not(layer: nn.Linear, shared: set[nn.Parameter]) -> str:
    """Return why a layer stays as it is; "": it can multiply in float8."""
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__}"
    if layer.weight in shared:
        return "its weight is another module's too"
    if layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
        return f"{layer.in_features} x {layer.out_features}"
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
    return "it has hooks" if any(hooks) else ""


def _nothing_to_convert(name: str, reasons: dict[str, str]) -> str:
    layers = ", ".join(f"{layer} ({reason})" for layer, reason in list(reasons.items())[:3])
    return (
        f"trainer.precision is '{name}', and no layer of the Task can multiply in float8: it must be"
        f" a torch.nn.Linear whose sizes are multiples of {_MULTIPLE}, with a weight of its own, and"
        f" there {f'are {layers}' if layers else 'is no linear layer'}. Use"
        " trainer.precision=bf16-mixed."
    )


def _as_on_a_gpu(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """torchao asks for autocast on GPUs alone."""
    if torch.is_autocast_enabled(inputs[0].device.type):
        return (inputs[0].to(torch.get_autocast_dtype(inputs[0].device.type)), *inputs[1:])
    return inputs
