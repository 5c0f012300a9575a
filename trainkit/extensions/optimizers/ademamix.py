"""AdEMAMix (Pagliardini, Ablin and Grangier 2024, arXiv:2409.03137): AdamW whose numerator has a
second, slow average of the gradients.

    m1 = beta1 x m1 + (1 - beta1) x g;   m2 = beta3 x m2 + (1 - beta3) x g;   v as AdamW's
    w  = w - lr x (m1 / (1 - beta1^t) + alpha x m2) / (sqrt(v / (1 - beta2^t)) + eps) - lr x decay x w

The step is that of pytorch_optimizer (trainkit[pytorch_optimizer]); it treats each element alone,
so ranks that hold parts of a weight step on them.
"""

from __future__ import annotations

from typing import Any

from trainkit.errors import ConfigError

try:
    from pytorch_optimizer import AdEMAMix as _AdEMAMix
except ImportError as _error:
    raise ConfigError(
        "optimizer=ademamix needs pytorch_optimizer, which is not installed. Install: pip install"
        " 'trainkit[pytorch_optimizer]'"
    ) from _error


class AdEMAMix(_AdEMAMix):
    """Takes parameters or groups.

    Args:
        params: parameters or groups.
        lr: AdamW's rate.
        betas: of the fast average, of the squares, and of the slow average.
        alpha: the weight of the slow average.
        t_alpha_beta3: steps in which alpha and beta3 grow to their values, usually all of the run;
            None for from the start, with which a large alpha is unstable (section 3.1 there).
        eps: added to the root of the second moment.
        weight_decay: decoupled, as AdamW's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha_beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            lr,
            (betas[0], betas[1], betas[2]),
            weight_decay,
            weight_decouple=True,
            alpha=alpha,
            t_alpha_beta3=t_alpha_beta3,
            eps=eps,
        )
