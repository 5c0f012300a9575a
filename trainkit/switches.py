"""torch's global switches, set for the length of a run and put back afterwards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def torch_switches(deterministic: bool, benchmark: bool, detect_anomaly: bool) -> Iterator[None]:
    """Set what is asked for; leave alone what is not.

    Args:
        deterministic: deterministic algorithms; an operation that has none raises.
        benchmark: cuDNN tries out which algorithm is the fastest for each shape.
        detect_anomaly: autograd names the operation of the forward whose backward gave NaN.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
    )
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        torch.use_deterministic_algorithms(True)
    if benchmark:
        torch.backends.cudnn.benchmark = True
    if detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.autograd.set_detect_anomaly(before[2], before[3])
