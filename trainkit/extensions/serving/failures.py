"""Which errors of a model's call are the server's, and not those of an input."""

from __future__ import annotations

import torch

# As allocators of torch on the host, of onnxruntime and of C++ say it, in errors of no own class.
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "Failed to allocate memory",
    "bad_alloc",
    "_ALLOC_FAILED",  # of cuBLAS and cuDNN
)
_OF_DEVICE = ("CUDA error", "CUDA failure", "HIP error")
# errors of one call, after which the device works: of a library, or of arguments of a launch
_OF_CALL = ("CUBLAS_STATUS_", "CUDNN_STATUS_", "invalid configuration argument", "invalid argument")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a call had too little memory, of the device or of the host."""
    is_known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_known or any(sign in _text_of_library(error) for sign in _NO_MEMORY)


def is_of_device(error: BaseException) -> bool:
    """Return whether the device has failed: a process that has met it can use it no more."""
    if is_out_of_memory(error) or any(sign in _text_of_library(error) for sign in _OF_CALL):
        return False
    is_known = isinstance(error, torch.AcceleratorError)
    return is_known or any(sign in _text_of_library(error) for sign in _OF_DEVICE)


def _text_of_library(error: BaseException) -> str:
    """Return what an error says that may be torch's or onnxruntime's; "" of another one."""
    is_of_onnx = type(error).__module__.startswith("onnxruntime")
    return str(error) if isinstance(error, RuntimeError) or is_of_onnx else ""
