"""SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in the eigenbases of Shampoo's preconditioners, of
the rows and the columns of each matrix.

The step is that of pytorch_optimizer (trainkit[pytorch_optimizer]); its first one changes no weight.
In the beginning a basis has directions that no gradient has had. The package takes them from the
last bits of a preconditioner, which the order of a sum over ranks changes: from one step on, two
ranks then differ from one process in the second digit. Here preconditioners of weights in float64
are rounded to float32 before they are decomposed, as the package's own QR decomposition is: with
them the directions are the same ones. Steps in float32 are the package's, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from trainkit.errors import ConfigError

try:
    from pytorch_optimizer import SOAP as _SOAP
except ImportError as _error:
    raise ConfigError(
        "optimizer=soap needs pytorch_optimizer, which is not installed. Install: pip install"
        " 'trainkit[pytorch_optimizer]'"
    ) from _error


class SOAP(_SOAP):
    """Takes parameters or groups.

    Args:
        params: parameters or groups.
        lr: the rate.
        betas: of the first and the second moment.
        shampoo_beta: of the preconditioners; None for the second of `betas`.
        weight_decay: decoupled, as AdamW's.
        precondition_frequency: steps between two computations of the bases.
        max_precondition_dim: a longer side of a matrix has no preconditioner.
        eps: added to the root of the second moment.
    """

    # see run/split_weights.py
    not_split = "it decomposes whole matrices, which no rank holds then"

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        weight_decay: float = 1e-2,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10000,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            params,
            lr,
            (betas[0], betas[1]),
            shampoo_beta,
            weight_decay,
            precondition_frequency,
            max_precondition_dim,
            eps=eps,
        )

    @staticmethod
    def get_orthogonal_matrix(mat: Any) -> Any:
        """Return the first bases; see above."""
        rounded: Any = _rounded(mat)
        return _SOAP.get_orthogonal_matrix(rounded)

    def get_orthogonal_matrix_qr(
        self, state: Any, max_precondition_dim: int = 10000, merge_dims: bool = False
    ) -> Any:
        """Return the next bases; see above."""
        rounded = {**state, "GG": _rounded(state["GG"])}
        bases = super().get_orthogonal_matrix_qr(rounded, max_precondition_dim, merge_dims)
        state["exp_avg_sq"] = rounded["exp_avg_sq"]  # in the order of the new basis
        return bases


def _rounded(matrices: Any) -> list[Any]:
    """Return preconditioners in float64 rounded to float32, and all others as they are."""
    return [
        matrix.float().double() if len(matrix) and matrix.dtype == torch.float64 else matrix
        for matrix in matrices
    ]
