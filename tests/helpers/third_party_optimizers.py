"""Optimizers as other packages have them: see test_third_party_optimizers.py."""

from __future__ import annotations

from typing import Any

import torch


class Counting(torch.optim.SGD):
    """SGD whose momentum grows; it counts its steps as MADGRAD does: beside the weights in its
    state.
    """

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take a step."""
        count = self.state.setdefault("k", torch.tensor(0.0))  # type: ignore[arg-type, call-overload]
        self.param_groups[0]["momentum"] = float(0.9 - 0.5 / (1 + count))
        count += 1
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Every second step goes back by a half (Zhang et al. 2019); made around another optimizer, as
    timm's and pytorch_optimizer's, without torch's __init__.
    """

    def __init__(
        self, base: torch.optim.Optimizer, own_form: bool, with_groups: bool = False
    ) -> None:
        self.base, self.own_form, self.with_groups = base, own_form, with_groups
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.slow = [w.detach().clone() for group in self.param_groups for w in group["params"]]
        self.count = 0
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's."""
        return self.base.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take a step of the inner optimizer."""
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            weights = [w for group in self.param_groups for w in group["params"]]
            for weight, slow in zip(weights, self.slow, strict=True):
                weight.data.copy_(slow.lerp_(weight.data, 0.5))

    def state_dict(self) -> dict[str, Any]:
        """Return both optimizers' states, in a form of its own or as torch's."""
        own = {"count": self.count, "slow": self.slow}
        base = self.base.state_dict()
        if self.with_groups:  # as torch_optimizer's
            return {"own": own, "fast": base["state"], "param_groups": base["param_groups"]}
        return {"own": own, "base": base} if self.own_form else {**base, **own}

    def load_state_dict(self, state: Any) -> None:
        """Restore them."""
        own = state["own"] if self.own_form else state
        self.count, self.slow = own["count"], [tensor.clone() for tensor in own["slow"]]
        if self.with_groups:
            state = {"base": {"state": state["fast"], "param_groups": state["param_groups"]}}
        self.base.load_state_dict(state["base"] if self.own_form else state)
        self.param_groups = self.base.param_groups


class Rows(torch.Tensor):
    """A tensor in bytes, with a scale for each row, as torchao's of 8 bits: of two plain ones."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Rows:
        """Return one of the shape of its codes."""
        made: Rows = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        """See __new__."""

    @classmethod
    def of(cls, whole: torch.Tensor) -> Rows:
        """Round a tensor to bytes."""
        scale = whole.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        return cls((whole / scale).round().to(torch.int8), scale, whole.dtype)

    def whole(self) -> torch.Tensor:
        """Return the plain tensor."""
        return self.codes * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, *sizes: Any) -> Rows:
        return cls(tensors["codes"], tensors["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Know as little as torchao's: to move and to detach."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes.clone(), args[0].scale.clone(), args[0].dtype)
        raise NotImplementedError(f"Rows: {func}")


class InBytes(torch.optim.Optimizer):
    """SGD whose momentum is in bytes, and whose rate is a tensor."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": torch.tensor(0.05)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                last = state["momentum"].whole() if state else torch.zeros_like(weight)
                state["momentum"] = Rows.of(0.9 * last + weight.grad)
                weight.sub_(group["lr"] * state["momentum"].whole())
