"""Adapters on two ranks: equal to one process, resumed bit for bit, and nothing of the frozen
layers is summed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.starts import Starts, line_of

STARTS = {"single": "single", "horovod": "horovod", "ddp": "ddp", "fsdp": "ddp"}
SEVERAL = [start for start in STARTS if start != "single"]
NAMES = ["lora", "dora", "whole"]

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """See Starts."""
    return Starts(
        lambda start: line_of(STARTS[start], 2, "lora.py") + " {out} " + start, tmp_path_factory
    )


@pytest.mark.parametrize("start", SEVERAL)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one_process(start: str, name: str, results: Any) -> None:
    """Adapters end as those of one process that accumulates, and frozen weights and norms as they
    began.
    """
    (alone,) = results["single"][name]
    for rank in results[start][name]:
        assert {*rank["ended"]["every"]} == {*alone["ended"]["every"]}
        for key, value in alone["ended"]["every"].items():
            near = 1e-12 if key in alone["ended"]["saved"] else 0
            torch.testing.assert_close(rank["ended"]["every"][key], value, rtol=0, atol=near)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", NAMES)
def test_resuming_changes_no_bit(start: str, name: str, results: Any) -> None:
    """A run from a checkpoint of adapters ends with the bits of the one that never stopped."""
    for rank in results[start][name]:
        for key, value in rank["ended"]["every"].items():
            assert torch.equal(rank["resumed"]["every"][key], value), key


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", NAMES)
def test_frozen_layers_have_no_gradient_and_are_not_summed(
    start: str, name: str, results: Any
) -> None:
    """Gradients, sums over ranks and checkpoints hold the trained weights alone."""
    for rank in results[start][name]:
        ended = rank["ended"]
        assert not any("base_layer" in key or "original_module" in key for key in ended["saved"])
        assert all(
            "lora_" in key or "modules_to_save" in key
            for key in ended["saved"]
            if key != "base_fingerprint"
        )
        assert ended["grads"] == {*ended["saved"]} - {"base_fingerprint"}
        if start in ("horovod", "ddp"):
            assert ended["summed"] == ended["grads"]
