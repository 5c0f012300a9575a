"""How gradients travel: as what they are packed, and what comes out."""

from __future__ import annotations

import pytest
import torch

from trainkit.engine.reduce.wire import make_wire


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_complex_gradients_travel_whole(compression: str) -> None:
    """As pairs, where sums are of real numbers alone; without compression in place."""
    wire = make_wire(compression, "average", 1.0, 2, frozenset({torch.float16, torch.float32}))
    grad = torch.tensor([1 + 2j, -3 - 4j], dtype=torch.complex64)
    sent = wire.pack(grad)
    assert sent.dtype is (torch.float16 if compression == "fp16" else torch.float32)
    total = wire.unpack(sent.mul_(2), torch.complex64)
    assert total.tolist() == [2 + 4j, -6 - 8j]
    assert (total.data_ptr() == grad.data_ptr()) is (compression == "none")
