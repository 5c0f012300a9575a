"""Muon for the matrices of a model, AdamW for all else: one optimizer of torch's two.

    m = momentum x m + (1 - momentum) x g
    u = (1 - momentum) x g + momentum x m                                      with nesterov, else m
    w = w - lr x weight_decay x w - lr x ratio x orthogonal(u)                      for each matrix

orthogonal() makes all singular values about 1, by Newton-Schulz steps in bfloat16 (Jordan et al.
2024); ratio = 0.2 x sqrt(the longer side), so that an update is as large as one of AdamW, and the
rate and decay are AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2).

The arithmetic is torch's own, on any engine: where ranks hold parts of a matrix, momentum and decay
are computed on the parts, and the orthogonalisation on the gathered matrix, by each rank.
torch.optim.Muon on such parts adds up partial products in bfloat16: of a matrix with more rows than
columns, the update then differs by up to 7 % from that of one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.device.shards import is_spread, local_of, whole_of
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.optimizers.spread import spread_as
from trainkit.optim.parameter_groups import ParameterGroups, kinds_in


class Muon(Optimizer):
    """Takes the groups of `decay_groups`: `Muon(decay_groups(self))`.

    AdamW gets what is not a matrix (biases, norms, convolutions), embeddings, and the head: the
    weight of the model's last nn.Linear. Each group has a `method`, "muon" or "adamw"; one that is
    added later is AdamW's.

    Args:
        params: of `decay_groups`, which know the model's layers.
        lr: the rate of both.
        weight_decay: of both; decoupled.
        momentum: of matrices.
        nesterov: see above.
        ns_steps: Newton-Schulz steps.
        adjust_lr_fn: the ratio above: "match_rms_adamw" is AdamW's size, "original" is sqrt(max(1,
            rows / columns)) and wants its own rate (0.02, say), "spectral_unclamped" is
            sqrt(rows / columns).
        betas: of AdamW.
        eps: of AdamW.
        adamw: names or patterns ("encoder.*") of the matrices that AdamW takes in place of
            embeddings and the head; an empty list leaves all matrices to Muon.
        adamw_lr: another rate for AdamW.

    Raises:
        ConfigError: there is no matrix for Muon, or a pattern is that of none.
    """

    def __init__(
        self,
        params: ParameterGroups,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original", "spectral_unclamped"] = (
            "match_rms_adamw"
        ),
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adamw: Sequence[str] | None = None,
        adamw_lr: float | None = None,
    ) -> None:
        groups = _split(params, adamw)
        # they get this optimizer's groups and state in each step
        none = [torch.empty(0, 0)]
        self._workers: dict[str, Optimizer] = {
            "muon": torch.optim.Muon(
                none,
                lr,
                weight_decay,
                momentum,
                nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            ),
            "adamw": torch.optim.AdamW(
                none, lr if adamw_lr is None else adamw_lr, (betas[0], betas[1]), eps, weight_decay
            ),
        }
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without a `method` it is AdamW's."""
        group = {"method": "adamw"} | param_group
        defaults = self._workers[group["method"]].defaults
        super().add_param_group(defaults | group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the weights; never waits for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for method, worker in self._workers.items():
            groups = [group for group in self.param_groups if group["method"] == method]
            if method == "muon" and any(is_spread(p) for group in groups for p in group["params"]):
                for group in groups:
                    self._step_spread(group)
            else:
                worker.param_groups = groups
                worker.state = self.state
                worker.step()
        return loss

    def _step_spread(self, group: dict[str, Any]) -> None:
        """Update matrices of which each rank holds a part; a collective."""
        momentum = group["momentum"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            mean = local_of(state["momentum_buffer"])
            gradient = local_of(parameter.grad)
            mean.lerp_(gradient, 1 - momentum)
            update = torch.empty_like(state["momentum_buffer"])
            local_of(update).copy_(gradient.lerp(mean, momentum) if group["nesterov"] else mean)
            # torch casts it to bfloat16 first: so it may travel
            change = self._orthogonal(whole_of(update.bfloat16()).to(update.dtype), group)
            weight = local_of(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(local_of(spread_as(change, parameter)))

    def _orthogonal(self, update: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what a whole update adds to its matrix: torch's step on zeros, without momentum
        and decay.
        """
        weight = nn.Parameter(torch.zeros_like(update))
        weight.grad = update
        worker = self._workers["muon"]
        worker.state = defaultdict(dict)
        worker.param_groups = [group | {"params": [weight], "momentum": 0.0, "weight_decay": 0.0}]
        worker.step()
        return weight.detach()


def _split(groups: Any, adamw: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the groups with a method each: matrices apart from the rest."""
    if not isinstance(groups, ParameterGroups):
        raise ConfigError(
            "Muon splits parameters by their layers and names: give it the groups of decay_groups,"
            " as trainkit.optim.Muon(trainkit.optim.decay_groups(self))."
        )
    matrices = matrices_of(groups.model, adamw)
    by_method: list[dict[str, Any]] = []
    for method, is_muon in (("muon", True), ("adamw", False)):
        for group in groups:
            own = [parameter for parameter in group["params"] if (parameter in matrices) is is_muon]
            by_method += [group | {"params": own, "method": method}] if own else []
    return by_method


def matrices_of(model: nn.Module, adamw: Sequence[str] | None = None) -> set[nn.Parameter]:
    """Return the parameters that Muon takes.

    Args:
        adamw: see Muon.

    Raises:
        ConfigError: there is none, or a pattern is that of no matrix.
    """
    if isinstance(adamw, str):
        raise ConfigError(
            f"optimizer.adamw is '{adamw}'; it must be a list of names or patterns: [{adamw}]."
        )
    names = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    if adamw is None:
        kinds = kinds_in(model)
        head = next((m for m in reversed([*model.modules()]) if isinstance(m, nn.Linear)), None)
        left = {name for name, p in names.items() if kinds[p] == "embedding"}
        left |= {name for name, p in names.items() if head is not None and p is head.weight}
    else:
        for pattern in adamw:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"optimizer.adamw has '{pattern}', and no matrix of {type(model).__name__} has"
                    f" such a name.{did_you_mean(pattern, names)} There are {_listed(names)}."
                )
        left = {name for name in names if any(fnmatchcase(name, pattern) for pattern in adamw)}
    if not names.keys() - left:
        why = f" Its matrices are AdamW's: {_listed(left)}." if left else ""
        hint = "optimizer.adamw=[] gives them to Muon; or use" if left else "Use"
        raise ConfigError(
            f"optimizer=muon, and {type(model).__name__} has no matrix for Muon, which takes no"
            f" convolutions, norms and biases.{why} {hint} optimizer=adamw."
        )
    return {p for name, p in names.items() if name not in left}


def _listed(names: Any) -> str:
    shown = list(names)
    more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
    return ", ".join(shown[:6]) + more
