"""Global switches of torch and of the C library, set during a run and restored afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Literal

import torch

from trainkit.console import warning

# Of glibc's mallopt (malloc.h). Blocks above M_MMAP_THRESHOLD are mapped by the kernel, and free
# memory at the heap's end returns to it above M_TRIM_THRESHOLD. By default glibc raises the first
# up to 32 MiB, and the second to twice of it.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**25
_NEVER = -1

Float32Matmul = Literal["highest", "high", "medium"]


@contextlib.contextmanager
def torch_flags(
    deterministic: bool | Literal["warn"],
    benchmark: bool,
    detect_anomaly: bool,
    float32_matmul: Float32Matmul | None = None,
) -> Iterator[None]:
    """Set the requested switches; leave the others unchanged.

    Args:
        deterministic: deterministic algorithms; an operation that has none raises, or with "warn"
            warns.
        benchmark: cuDNN searches the fastest algorithm for each shape.
        detect_anomaly: autograd names the forward operation that gave NaN in backward.
        float32_matmul: how products of float32 matrices are rounded (see
            torch.set_float32_matmul_precision).
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
    )
    if deterministic:
        own = "CUBLAS_WORKSPACE_CONFIG" in os.environ
        if torch.cuda.is_initialized() and not own:  # type: ignore[no-untyped-call]
            warning(
                f"trainer.deterministic is {str(deterministic).lower()}, and this process has used"
                " a GPU before: cuBLAS reads its setting once, at its first product. If an error"
                " names CUBLAS_WORKSPACE_CONFIG, set it before the script starts: export"
                " CUBLAS_WORKSPACE_CONFIG=:4096:8"
            )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
    if benchmark:
        torch.backends.cudnn.benchmark = True
    if detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
    matmul_before = None
    if float32_matmul is not None:
        matmul_before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(float32_matmul)
    try:
        yield
    finally:
        if matmul_before is not None:
            torch.set_float32_matmul_precision(matmul_before)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
        torch.autograd.set_detect_anomaly(before[3], before[4])


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep the memory that a step on the CPU frees for the next step.

    Each step allocates and frees activations and gradients. glibc returns freed memory to the
    kernel, which hands it out again page by page, each zeroed: 3 to 8 % of a step of ResNet-50
    (batch 16). With another C library, or if the user has configured glibc's allocator
    (MALLOC_..._, GLIBC_TUNABLES), nothing changes.
    """
    own = any(
        name in os.environ
        for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
    )
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or own or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST)
