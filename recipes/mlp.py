"""A small multi-layer perceptron over flattened images."""

from __future__ import annotations

from torch import nn

from trainkit.arguments import PositiveInt


class MLP(nn.Sequential):
    """Flatten, then `depth` times Linear and ReLU, then logits.

    Args:
        num_inputs: numbers in a flattened image: channels x height x width.
        num_classes: number of logits.
        width: of the hidden layers.
        depth: number of hidden layers.
    """

    def __init__(
        self,
        num_inputs: PositiveInt,
        num_classes: PositiveInt,
        width: PositiveInt = 128,
        depth: PositiveInt = 2,
    ) -> None:
        sizes = [num_inputs] + [width] * depth
        hidden = [
            layer
            for a, b in zip(sizes, sizes[1:], strict=False)
            for layer in (nn.Linear(a, b), nn.ReLU())
        ]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(width, num_classes))
        self.num_inputs = num_inputs
