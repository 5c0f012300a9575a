"""Which parameters' gradients travel together, and which travel as rows.

Backward reaches the last layers first, so all lists here run from the last parameter to the first:
sums start in the order in which gradients become ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigError, did_you_mean

NamedParameter = tuple[str, nn.Parameter]


def split_frozen(
    named: Iterable[NamedParameter],
) -> tuple[list[NamedParameter], list[NamedParameter]]:
    """Return (trained, frozen) parameters, each once,
    under clean names (no `_orig_mod.` of torch.compile).
    """
    seen: set[Tensor] = set()
    trained: list[NamedParameter] = []
    frozen: list[NamedParameter] = []
    for name, parameter in named:
        if parameter not in seen:
            seen.add(parameter)
            (trained if parameter.requires_grad else frozen).append(
                (name.replace("_orig_mod.", ""), parameter)
            )
    return trained, frozen


def find_sparse(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> set[Tensor]:
    """Return the parameters whose gradients are sparse, as every rank can tell before the first
    step.

    They are the weights of modules with `sparse=True` (nn.Embedding, nn.EmbeddingBag, and what is
    built like them) and what SparseAdam updates. A sparse gradient of any other parameter is made
    dense before it is summed: a rank that has none in a step could not know that it should take
    part with rows.
    """
    sparse: set[Tensor] = set()
    for module in model.modules():
        if getattr(module, "sparse", None) is True:
            # not by its name alone: to read a parametrized weight may compute, and draw it again
            sparse.update(
                w for name, w in module.named_parameters(recurse=False) if name == "weight"
            )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.SparseAdam):
            sparse.update(
                parameter for group in optimizer.param_groups for parameter in group["params"]
            )
    return sparse


def by_size(
    trained: Sequence[NamedParameter], bucket_bytes: int, sparse: AbstractSet[Tensor] = frozenset()
) -> list[list[NamedParameter]]:
    """Group parameters by dtype, up to `bucket_bytes` a bucket;
    a sparse one has a bucket of its own.
    """
    buckets: list[list[NamedParameter]] = []
    held = 0
    for name, parameter in reversed(trained):
        size = parameter.numel() * parameter.element_size()
        before = buckets[-1][-1][1] if buckets else None
        alone = parameter in sparse or before in sparse
        if before is None or alone or before.dtype != parameter.dtype or held + size > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append((name, parameter))
        held += size
    return buckets


def by_number(
    trained: Sequence[NamedParameter], num_groups: int, sparse: AbstractSet[Tensor] = frozenset()
) -> list[list[NamedParameter]]:
    """Group parameters into `num_groups` runs of equal length (within one); a group is split
    between different dtypes.

    Raises:
        ConfigError: there are fewer parameters than groups.
    """
    dense = [named for named in reversed(trained) if named[1] not in sparse]
    if num_groups > len(dense):
        raise ConfigError(
            f"engine.num_groups is {num_groups}, but the model has {len(dense)} trained parameters"
            " (weights of sparse embeddings not counted). Use a smaller number, or null for a sum"
            " for each parameter."
        )
    size, longer = divmod(len(dense), num_groups)
    buckets = []
    start = 0
    for i in range(num_groups):
        end = start + size + (1 if i < longer else 0)
        buckets += _by_dtype(dense[start:end])
        start = end
    return buckets + [[named] for named in reversed(trained) if named[1] in sparse]


def by_name(
    trained: Sequence[NamedParameter],
    groups: Sequence[Sequence[str]],
    sparse: AbstractSet[Tensor] = frozenset(),
) -> list[list[NamedParameter]]:
    """Group the parameters that `groups` name; each other parameter stays alone.

    Args:
        trained: the parameters, with their names.
        groups: names of parameters, or of modules for all of theirs.
        sparse: parameters that cannot be grouped.

    Raises:
        ConfigError: a name matches no parameter and no module, stands in two groups, or is a sparse
            embedding's.
    """
    group_of: dict[str, int] = {}
    for i, group in enumerate(groups):
        for entry in group:
            named = [
                (name, p) for name, p in trained if name == entry or name.startswith(f"{entry}.")
            ]
            if not named:
                known = [name for name, _ in trained]
                raise ConfigError(
                    f"engine.groups names '{entry}', which is no trained parameter and no module"
                    " that has"
                    f" one.{did_you_mean(entry, [*known, *(name.rpartition('.')[0] for name in known)])}"
                    " Name parameters or modules as task.named_parameters() does."
                )
            for name, parameter in named:
                if group_of.setdefault(name, i) != i:
                    raise ConfigError(
                        f"engine.groups has '{name}' in two groups. Name it, or its module, in one"
                        " of them only."
                    )
                if parameter in sparse:
                    raise ConfigError(
                        f"engine.groups has '{name}', whose sparse gradient travels as rows and"
                        " cannot be summed in a group. Leave it out, or set"
                        " engine.sparse_as_dense=true."
                    )
    gathered: dict[int, list[NamedParameter]] = {}
    alone: list[list[NamedParameter]] = []
    for name, parameter in reversed(trained):
        if name in group_of:
            gathered.setdefault(group_of[name], []).append((name, parameter))
        else:
            alone.append([(name, parameter)])
    return [bucket for group in gathered.values() for bucket in _by_dtype(group)] + alone


def _by_dtype(entries: list[NamedParameter]) -> list[list[NamedParameter]]:
    """Split a group by dtype: a collective has one."""
    dtypes = dict.fromkeys(parameter.dtype for _, parameter in entries)
    return [[(name, p) for name, p in entries if p.dtype == dtype] for dtype in dtypes]
