"""The plan of a fit, as a value and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainkit.console import console_of
from trainkit.engine.base import Engine
from trainkit.extensions.pipeline.stages import stage_rows
from trainkit.extensions.plan import plan
from trainkit.extensions.plan.advice import advise
from trainkit.extensions.plan.fits import choices, fit_rows, measure_need
from trainkit.extensions.plan.planned import groups_of, planned
from trainkit.extensions.plan.traffic import traffic_rows
from trainkit.extensions.script.subject import Subject


@dataclass(frozen=True)
class Plan:
    """The plan of a fit.

    Attributes:
        of: names the fit.
        where: its ranks, in words.
        ranks: their number.
        engine: its name.
        sections: name -> title and rows.
        advice: sentences.
        fits: whether an engine fits in the memory asked for; None if none was.
    """

    of: str
    where: str
    ranks: int
    engine: str
    sections: Mapping[str, tuple[str, Sequence[tuple[str, str]]]]
    advice: Sequence[str]
    fits: bool | None = None

    def facts(self) -> dict[str, Any]:
        """Return it for --json."""
        rows = {name: [list(row) for row in rows] for name, (_, rows) in self.sections.items()}
        facts = {"of": self.of, "ranks": self.ranks, "engine": self.engine, **rows}
        return facts | {"advice": list(self.advice), "fits": self.fits}


def make_plan(subject: Subject, run_dir: str, cores: int, memory_gb: float | None = None) -> Plan:
    """Return the plan of a fit for the launcher's ranks, or simulated ones, on hosts of `cores`
    cores.

    Args:
        subject: the fit.
        run_dir: a temporary folder.
        cores: of a host.
        memory_gb: of a GPU: which engine fits in it is planned too.
    """
    with planned(subject, run_dir) as planned_run:
        run = planned_run.run
        callbacks = planned_run.callbacks
        engine = run.engine
        ranks = engine.ranks.world_size
        advice = advise(run, callbacks, dict(subject.nodes), cores)
        title = f"plan of {subject.of} at {_ranks(engine)}"
        sections = {
            "batch": (title, plan.batch_rows(run)),
            "step": ("a step, in order, with owners", plan.step_rows(run, planned_run.hooks)),
            "rate": ("learning rate", plan.rate_rows(run)),
        }
        # first: measuring the rest spoils the weights
        need = measure_need(run) if memory_gb is not None else None
        sizes = plan.measure(run, subject.engine.get("compression") or "none")
        replicas, tensor, stages, context = groups_of(subject.engine)
        if stages > 1:
            count = run.batch_plan.accumulate
            rows = stage_rows(run.task, stages, count, tensor)
            sections["stages"] = (f"the layers of {stages} stages", rows)
        parts = ranks // replicas if engine.name == "fsdp" else 1
        sections["size"] = (
            "traffic, memory, disk",
            [
                *plan.size_rows(sizes, ranks, parts, engine.name == "deepspeed", tensor, stages),
                *_token_rows(context),
                *traffic_rows(run, sizes.payload),
                *plan.checkpoint_rows(run, callbacks, sizes),
                *plan.copy_rows(callbacks, sizes, engine.name, parts),
            ],
        )
        fits = None
        if memory_gb is not None and need is not None:
            layouts = choices(sizes, need, ranks, engine.ranks.local_size)
            rows, fits = fit_rows(layouts, need, memory_gb, subject.typed)
            sections["engines"] = (f"which engine, in {memory_gb:g} GB", rows)
    return Plan(subject.of, _ranks(engine), ranks, engine.name, sections, advice, fits)


def show_plan(made: Plan) -> None:
    """Print a plan."""
    console = console_of()
    for title, rows in made.sections.values():
        console.print(Text(f"\n{title}", style="bold"))
        table = Table.grid(padding=(0, 4, 0, 0))
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        console.print(Padding(table, (0, 0, 0, 2), expand=False))
    heading = "\nto look at" if made.advice else "\nnothing to look at"
    console.print(Text(heading, style="bold"))
    for sentence in made.advice:
        console.print(f"  - {sentence}", soft_wrap=True, markup=False)


def _token_rows(context: int) -> list[tuple[str, str]]:
    """Return a row on what ranks have of a sample that they share."""
    if context == 1:
        return []
    return [
        (
            "tokens of a rank",
            f"1/{context} of each sample's, and of their activations; keys and values of all are"
            " gathered in each layer's forward, and their gradients summed in its backward",
        )
    ]


def _ranks(engine: Engine) -> str:
    if engine.ranks.world_size == 1:
        return "1 rank"
    groups = f", {engine.ranks.groups}" if engine.ranks.groups else ""
    return (
        f"{engine.ranks.world_size} ranks ({engine.name}, {engine.ranks.local_size} a host{groups})"
    )
