"""Peak FLOP/s of GPUs: the vendors' figures, for dense matrices.

From NVIDIA's data sheets and architecture papers; half of the figure if a sheet gives it with
sparsity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from trainkit.device.precision import PrecisionName


@dataclass(frozen=True)
class Peak:
    """TFLOP/s of one GPU; None if it has no such unit."""

    half: float  # float16 and bfloat16 on tensor cores, summed in float32
    tf32: float | None  # float32 matrices rounded to TF32 on tensor cores
    single: float  # float32 outside of tensor cores
    double: float | None  # float64, on tensor cores if they support it
    source: str  # the document


_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet; the H200's is the same"
_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet"
_ADA = "NVIDIA Ada GPU architecture, appendix A"
# A pattern in torch.cuda.get_device_name() -> its figures. The first that fits counts.
_PEAKS = {
    r"\bGB200\b": Peak(2500, 1250, 80, 40, "NVIDIA GB200 NVL72 data sheet, a 72nd of it"),
    r"\bB200\b": Peak(2250, 1125, 75, 37, "NVIDIA HGX B200 data sheet, an eighth of it"),
    r"\bH[12]00 NVL\b": Peak(835.5, 417.5, 60, 60, _HOPPER),
    r"\bH100 PCIe\b": Peak(756.5, 378, 51.2, 51.2, "NVIDIA H100 Tensor Core GPU data sheet, PCIe"),
    r"\bH[12]00\b|\bGH200\b": Peak(989.4, 494.7, 66.9, 66.9, _HOPPER),
    r"\bA100\b": Peak(312, 156, 19.5, 19.5, _AMPERE),
    r"\bA30\b": Peak(165, 82, 10.3, 10.3, "NVIDIA A30 Tensor Core GPU data sheet"),
    r"\bA10\b": Peak(125, 62.5, 31.2, None, "NVIDIA A10 Tensor Core GPU data sheet"),
    r"\bA40\b": Peak(149.7, 74.8, 37.4, None, "NVIDIA A40 data sheet"),
    r"\bRTX A6000\b": Peak(154.8, 77.4, 38.7, None, "NVIDIA RTX A6000 data sheet"),
    r"\bL40S\b": Peak(362, 183, 91.6, None, "NVIDIA L40S data sheet"),
    r"\bL4\b": Peak(121, 60, 30.3, None, "NVIDIA L4 Tensor Core GPU data sheet"),
    r"\bRTX 4090\b(?! (D|Laptop))": Peak(165.2, 82.6, 82.6, 1.29, _ADA),
    r"\bRTX 3090\b(?! Ti)": Peak(
        71, 35.6, 35.6, 0.56, "NVIDIA Ampere GA102 GPU architecture, appendix A"
    ),
    r"\bT4\b": Peak(65, None, 8.1, None, "NVIDIA T4 Tensor Core GPU data sheet"),
    r"\bV100-SXM2\b": Peak(125, None, 15.7, 7.8, "NVIDIA V100 Tensor Core GPU data sheet, SXM2"),
    r"\bV100-PCIE\b": Peak(112, None, 14, 7, "NVIDIA V100 Tensor Core GPU data sheet, PCIe"),
}


def peak_flops_of(
    device_name: str,
    precision: PrecisionName,
    tf32: bool | None = None,
    convolves: bool = False,
) -> float | None:
    """Return a GPU's peak FLOP/s for matrices of a precision, or None if unknown: another device,
    or a part of one (MIG).

    Args:
        device_name: as returned by torch.cuda.get_device_name().
        precision: trainer.precision. Of "fp8-mixed" it is bfloat16's peak, which part of its
            products have.
        tf32: whether float32 matrices may be rounded to TF32. Default: torch's setting.
        convolves: whether the model has convolutions, which torch rounds to TF32 by default.
    """
    peak = next((peak for pattern, peak in _PEAKS.items() if re.search(pattern, device_name)), None)
    if peak is None or re.search(r"\bMIG\b", device_name):
        return None
    if precision == "64-true":
        tera = peak.double
    elif precision == "32-true":
        # allow_tf32 cannot be read if the user has set this one.
        rounded = torch.backends.cuda.matmul.fp32_precision == "tf32" if tf32 is None else tf32
        if convolves and tf32 is None:
            cudnn: Any = torch.backends.cudnn
            rounded = rounded or cudnn.conv.fp32_precision == "tf32"
        tera = peak.tf32 if rounded and peak.tf32 is not None else peak.single
    else:
        tera = peak.half
    return None if tera is None else tera * 1e12
