"""Which layout a run fits in: the memory of a rank under each (layouts.py), and the simplest that a
GPU of a given size can hold.

The fewest means come first, and among as many: whole copies, fsdp, activation checkpointing,
engine.tensor within a host, engine.pipeline, engine.context; weights in host memory come last. All
layouts take the same steps: where ranks share samples, each takes more microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainkit.extensions.pipeline.stages import idle_share
from trainkit.extensions.plan.layouts import (
    Layout,
    MeasuredRun,
    RankBytes,
    gathered_bytes,
    rank_bytes,
)
from trainkit.extensions.plan.measured import Measuring
from trainkit.extensions.plan.plan import Sizes
from trainkit.extensions.plan.starting import TypedFit, start_of
from trainkit.extensions.plan.traffic import ring_bytes, split_bytes
from trainkit.extensions.reports.grid import human
from trainkit.run.run import Run

_ROOM = 0.9  # of a GPU's memory: the rest is CUDA's, NCCL's and the allocator's
_OF_GB = 10**9
_OF_A_HOST = (
    2,
    4,
    8,
)  # ranks of a host that may share layers or a sequence
_STAGES = (2, 4, 8, 16, 32)
Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class PlannedFit:
    """A layout, what starts it, and what it takes.

    Attributes:
        settings: that start it.
        ranks: the bytes of a rank of each stage.
        sent: bytes that a rank sends in a step, by what they are of.
        waiting: the share of a step in which a pipeline's ranks wait; 0 without one.
        why: what it costs beside the memory.
    """

    layout: Layout
    settings: str
    ranks: Sequence[RankBytes]
    sent: Mapping[str, int]
    waiting: float
    why: str

    @property
    def device(self) -> int:
        """The bytes of a GPU of the stage that needs most."""
        return max(own.device for own in self.ranks)

    def facts(self, room: float) -> dict[str, Any]:
        """Return it for --json."""
        return {
            "settings": self.settings,
            "device_bytes": self.device,
            "host_bytes": max(own.host for own in self.ranks),
            "stages": [vars(own) for own in self.ranks],
            "sent_bytes": dict(self.sent),
            "waiting": self.waiting,
            "fits": self.device <= room,
        }


def room_of(memory_gb: float) -> float:
    """Return the bytes of a GPU that tensors can have."""
    return memory_gb * _OF_GB * _ROOM


def measure_layouts(
    run: Run,
    tensor_plan: Mapping[str, Any] | None,
    groups: Mapping[str, int],
) -> Measuring:
    """Measure what the layouts of a run's ranks need.

    Args:
        groups: "tensor", "pipeline" (stages) and "context" of the run itself, which are measured too.

    Raises:
        ConfigError: there is no batch to measure.
    """
    ranks = run.engine.ranks
    world = ranks.world_size
    shared = [n for n in _OF_A_HOST if not ranks.local_size % n and not world % n]
    tried = {
        "tensor": shared,
        "pipeline": [n for n in _STAGES if not world % n],
        "context": shared,
    }
    given = {name: sorted({*tried[name], groups[name]} - {1}) for name in tried}
    measuring = Measuring(run, tensor_plan)
    measuring.measure(given["tensor"], given["pipeline"], given["context"])
    return measuring


class Fits:
    """The layouts of a run.

    Args:
        sizes: of its weights and gradients.
        left_out: settings that the Task cannot take -> the reason.
        places: ranks, and those of a host.
        microbatches: of a step, on all ranks.
        given: trainer.accumulate_grad_batches as it is set; None if layouts do not set it, since
            trainer.global_batch_size does.
    """

    def __init__(
        self,
        measured: MeasuredRun,
        sizes: Sizes,
        left_out: Mapping[str, str],
        places: tuple[int, int],
        microbatches: int,
        given: int | None,
    ) -> None:
        self._measured, self._sizes = measured, sizes
        self.left_out = dict(left_out)
        self._ranks, self._local = places
        self._microbatches, self._given = microbatches, given

    def all(self, room: float) -> list[PlannedFit]:
        """Return them, the simplest first; of several numbers of ranks that share, the first that
        fits in `room` bytes, or the last. Those of another global batch are left out.
        """
        result = []
        families = [*filter(None, map(self._of_same_batch, self._families()))]
        for family in sorted(
            families,
            key=lambda own: (own[0].offloads, own[0].means),
        ):
            fits = [self.fit(layout) for layout in family]
            result.append(
                next(
                    (own for own in fits if own.device <= room),
                    fits[-1],
                )
            )
        return result

    def _of_same_batch(self, family: Sequence[Layout]) -> list[Layout]:
        """Return the layouts whose ranks can take a step's microbatches, as many each."""
        same = [own for own in family if not self._microbatches % own.data_ranks]
        if len(same) < len(family):
            self.left_out["layouts of another global batch"] = (
                f"a step's {self._microbatches} microbatches do not come out even on their ranks. A"
                " smaller data.batch_size makes more of them"
            )
        return same

    def fit(self, layout: Layout) -> PlannedFit:
        """Return what a layout takes."""
        layout = replace(
            layout,
            accumulate=max(1, -(-self._microbatches // layout.data_ranks)),
        )
        ranks = rank_bytes(self._measured, layout)
        if layout.engine == "auto":
            ranks = [replace(own, step=own.step + self._sizes.held) for own in ranks]
        return PlannedFit(
            layout,
            self._settings(layout),
            ranks,
            self._sent(layout),
            self._waiting(layout),
            _why(layout),
        )

    def _families(self) -> Iterator[list[Layout]]:
        """Yield the layouts to try; those of one list differ in a number."""
        measured, ranks = self._measured, self._ranks
        hosts = ranks // self._local
        tensors = sorted(count for count in measured.split if count > 1)
        # the run's own schedule may have several stages on each rank
        pipelines = sorted(count for count in measured.stages if not ranks % count)
        contexts = sorted({context for _, context, _ in measured.recordings} - {1})
        for again in sorted({bool(kind[2]) for kind in measured.recordings}):
            yield [Layout(ranks, recomputes=again)]
            if ranks == 1:
                continue
            split = Layout(ranks, "fsdp", recomputes=again)
            yield [replace(split, gathers_once=True)]
            if hosts > 1 and ranks == hosts * self._local:
                yield [replace(split, replicas=hosts)]
            yield [split]
            more = [
                [replace(split, tensor=count) for count in tensors],
                [replace(split, pipeline=count) for count in pipelines],
                [replace(split, context=count) for count in contexts],
                [
                    replace(split, tensor=tensor, pipeline=stages)
                    for stages in pipelines
                    for tensor in tensors
                    if not ranks % (tensor * stages)
                ],
            ]
            yield from filter(None, more)
        if ranks > 1:
            yield [
                Layout(
                    ranks,
                    "fsdp",
                    offloads=True,
                    recomputes=again,
                )
            ]

    def _settings(self, layout: Layout) -> str:
        given = [f"engine={layout.engine}"]
        given += ["engine.reshard_after_forward=false"] * layout.gathers_once
        given += ["engine.cpu_offload=true"] * layout.offloads
        for name in (
            "replicas",
            "tensor",
            "pipeline",
            "context",
        ):
            if getattr(layout, name) > 1:
                given.append(f"engine.{name}={getattr(layout, name)}")
        given += ["trainer.activation_checkpointing=true"] * layout.recomputes
        if self._given is not None and layout.accumulate != self._given:
            given.append(f"trainer.accumulate_grad_batches={layout.accumulate}")
        return " ".join(given)

    def _sent(self, layout: Layout) -> dict[str, int]:
        """Return the bytes that a rank sends in a step."""
        count = layout.accumulate
        if layout.engine != "fsdp":
            return {"gradients": ring_bytes(self._sizes.payload, layout.ranks)}
        weights, gradients = gathered_bytes(self._measured, layout)
        weights = int(weights * self._sizes.gathered)
        split = split_bytes(weights, gradients, layout)
        sent = {"weights and gradients": split}
        between = self._measured.recordings[layout.kind].sent * count
        if layout.pipeline > 1:
            homes = self._measured.stages[layout.pipeline]
            first = [homes.index(stage) for stage in range(1, layout.pipeline)]
            entering = max(self._measured.entering[unit] for unit in first)
            sent["stages"] = 2 * entering * count
            between //= layout.pipeline
        if layout.tensor > 1 or layout.context > 1:
            sent["widths" if layout.tensor > 1 else "keys and values"] = between
        return sent

    def _waiting(self, layout: Layout) -> float:
        homes = self._measured.stages.get(layout.pipeline)
        work = self._measured.work
        if homes is None:
            return 0.0
        of_stages = [0] * layout.pipeline
        for stage, own in zip(homes, work, strict=True):
            of_stages[stage] += own
        return idle_share(of_stages, layout.accumulate)


def _why(layout: Layout) -> str:
    """Return what a layout costs beside memory and bytes."""
    costs = []
    if layout.recomputes:
        costs.append("blocks compute their forward twice")
    if layout.tensor > 1:
        costs.append(f"in each layer {layout.tensor} ranks of a host wait for each other")
    if layout.context > 1:
        costs.append("keys travel in each layer")
    if layout.offloads:
        costs.append("weights come from host memory, and are updated there")
    return ", ".join(costs)


def fit_rows(
    fits: Sequence[PlannedFit],
    left_out: Mapping[str, str],
    memory_gb: float,
    typed: TypedFit,
) -> tuple[Rows, bool]:
    """Return a row for each layout, and how to start the first that fits in a GPU of `memory_gb`;
    and whether one fits.

    Args:
        left_out: settings that the Task cannot take -> the reason.
        typed: the fit.
    """
    room = room_of(memory_gb)
    rows = [
        (
            "room",
            f"{memory_gb:g} GB less a tenth for CUDA, NCCL and the allocator",
        )
    ]
    rows += [(own.settings, _row(own, room)) for own in fits]
    rows += [(f"without {setting}", reason) for setting, reason in left_out.items()]
    best = next((own for own in fits if own.device <= room), None)
    if best is None:
        rows.append(
            (
                "none fits",
                "use more ranks, a smaller data.batch_size, or trainer.precision=bf16-mixed",
            )
        )
    else:
        rows.append(("use", start_of(best.layout, best.settings, typed)))
    return rows, best is not None


def _row(own: PlannedFit, room: float) -> str:
    """Return a layout's bytes, verdict and costs."""
    most = max(own.ranks, key=lambda rank: rank.device)
    parts = f"{human(own.device)} a rank ({human(most.step)} of it in a step)"
    if most.host:
        parts += f", {human(most.host)} of the host's"
    if len(own.ranks) > 1:
        parts += f", on stage {most.stage}"
    sent = {name: size for name, size in own.sent.items() if size}
    shown = f"sends {human(sum(sent.values()))}"
    if len(sent) > 1:
        shown += f" ({', '.join(f'{name} {human(size)}' for name, size in sent.items())})"
    costs = [own.why] * bool(own.why)
    if own.waiting:
        costs.append(f"ranks wait {own.waiting:.0%} of a step")
    verdict = "fits" if own.device <= room else "does not fit"
    return "; ".join([f"{parts}, {shown}: {verdict}", *costs])
