"""What a step sends under each kind of communication, on average over a long run."""

from __future__ import annotations

from trainkit.console import plural
from trainkit.engine.step_settings import Communication, Exact
from trainkit.extensions.communication.settings import Alone, DiLoCo, LocalSGD, PowerSGD
from trainkit.extensions.plan.layouts import Layout
from trainkit.extensions.reports.grid import human
from trainkit.run.run import Run

_WIDE = 4  # bytes of a number of a factor, or of a change of weights, at least


def ring_bytes(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends for a sum over ranks by a ring: Patarasuk & Yuan 2009."""
    return 2 * size * (ranks - 1) // ranks


def split_bytes(weights: int, gradients: int, layout: Layout) -> int:
    """Return the bytes that each rank sends in a step if ranks split weights, by rings.

    Args:
        weights, gradients: bytes of what is gathered, and of what is summed in parts.
    """
    parts = layout.parts
    gathered = layout.gathers * weights
    within = (gathered + gradients) * (parts - 1) // parts
    between = ring_bytes(gradients // parts, layout.replicas)
    return within + between


def held_bytes(run: Run) -> int:
    """Return the bytes that a rank holds beside its weights for approximate communication."""
    kind = run.options.communication
    if run.engine.ranks.world_size == 1:
        return 0
    trained = [p for p in run.task.parameters() if p.requires_grad]
    wide = sum(p.numel() * max(_WIDE, p.element_size()) for p in trained)
    if isinstance(kind, PowerSGD):
        return wide  # what factors left out
    if isinstance(kind, Alone):
        return wide * (1 + bool(kind.outer_momentum))  # shared weights
    return 0


def traffic_rows(run: Run, payload: int) -> list[tuple[str, str]]:
    """Return a row for the run's own communication, or for each kind at its defaults if that is
    exact.

    Args:
        payload: bytes of the gradients that a step sums over ranks.
    """
    chosen = run.options.communication
    if not payload or run.engine.name not in ("horovod", "ddp"):
        return []
    kinds: list[Communication] = (
        [PowerSGD(), LocalSGD(), DiLoCo()] if isinstance(chosen, Exact) else [chosen]
    )
    rows = []
    for kind in kinds:
        size, how = _bytes_of(run, kind)
        title = "sent in its place" if kind is chosen else f"communication={kind.name}"
        rows.append(
            (title, f"{human(size)} a step, {payload / max(1, size):.3g} times less: {how}")
        )
    return rows


def _bytes_of(run: Run, kind: Communication) -> tuple[int, str]:
    trained = [p for p in run.task.parameters() if p.requires_grad]
    sizes = [p.numel() * max(_WIDE, p.element_size()) for p in trained]
    if isinstance(kind, Alone):
        every = plural(kind.every_n_steps, "step")
        return (
            sum(sizes) // kind.every_n_steps,
            f"changes of weights, {human(sum(sizes))} each {every}",
        )
    assert isinstance(kind, PowerSGD)
    total = narrow = 0
    for parameter, size in zip(trained, sizes, strict=True):
        rank = kind.rank_for(tuple(parameter.shape))
        rows = len(parameter) if parameter.dim() else 1
        factors = (
            rank * (rows + parameter.numel() // max(1, rows)) * max(_WIDE, parameter.element_size())
        )
        total = total + (factors if rank else size)
        narrow = narrow + bool(rank)
    return (
        total,
        (
            f"{narrow} of {plural(len(trained), 'gradient')} as factors of rank {kind.rank}, in two"
            " messages a bucket"
        ),
    )
