"""The plan of a fit, as a value and as a table."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainkit.console import console_of
from trainkit.engine.base import Engine
from trainkit.extensions.pipeline.stages import stage_rows
from trainkit.extensions.pipeline.work import try_to_count
from trainkit.extensions.plan import plan, rates
from trainkit.extensions.plan.advice import advise
from trainkit.extensions.plan.fits import (
    Fits,
    fit_rows,
    measure_layouts,
    room_of,
)
from trainkit.extensions.plan.layouts import (
    Layout,
    MeasuredRun,
    rank_bytes,
)
from trainkit.extensions.plan.planned import Planned, groups_of, planned, schedule_in
from trainkit.extensions.plan.saved import checkpoint_rows, copy_rows
from trainkit.extensions.plan.starting import TypedFit
from trainkit.extensions.plan.traffic import traffic_rows
from trainkit.extensions.script.subject import Subject
from trainkit.launch.environment import read_launcher
from trainkit.run.run import Run
from trainkit.run.step_settings import sample_of


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
        fits: whether a layout fits in the memory asked for; None if none was.
        layouts: those tried, as values.
    """

    of: str
    where: str
    ranks: int
    engine: str
    sections: Mapping[str, tuple[str, Sequence[tuple[str, str]]]]
    advice: Sequence[str]
    fits: bool | None = None
    layouts: Sequence[Mapping[str, Any]] = ()

    def facts(self) -> dict[str, Any]:
        """Return it for --json."""
        rows = {name: [list(row) for row in rows] for name, (_, rows) in self.sections.items()}
        facts = {
            "of": self.of,
            "ranks": self.ranks,
            "engine": self.engine,
            **rows,
        }
        tried = {"layouts": list(self.layouts)} if self.layouts else {}
        return facts | tried | {"advice": list(self.advice), "fits": self.fits}


def make_plan(
    subject: Subject,
    run_dir: str,
    cores: int,
    memory_gb: float | None = None,
) -> Plan:
    """Return the plan of a fit for the launcher's ranks, or simulated ones, on hosts of `cores`
    cores.

    Args:
        subject: the fit.
        run_dir: a temporary folder.
        cores: of a host.
        memory_gb: of a GPU: which engine fits in it is planned too.
    """
    with _compiling_nothing(subject), planned(subject, run_dir) as planned_run:
        run = planned_run.run
        callbacks = planned_run.callbacks
        engine = run.engine
        ranks = engine.ranks.world_size
        advice = advise(run, callbacks, dict(subject.nodes), cores)
        title = f"plan of {subject.of} at {_ranks(engine)}"
        sections = {
            "batch": (title, plan.batch_rows(run)),
            "step": ("a step, in order, with owners", _step_rows(planned_run, subject)),
            "rate": ("learning rate", rates.rate_rows(run)),
        }
        # first: measuring the rest spoils the weights
        tensor_plan = subject.engine.get("tensor_plan")
        layout = _layout_of(run, subject.engine)
        stages = schedule_in(subject.engine).stages
        groups = {"tensor": layout.tensor, "pipeline": stages, "context": layout.context}
        measuring = None if memory_gb is None else measure_layouts(run, tensor_plan, groups)
        sizes = plan.measure(run, subject.engine)
        measured = None if measuring is None else measuring.measured()
        if stages > 1:
            samples = measuring.samples if measuring is not None else run.batch_plan.batch_size or 1
            rows = _stage_rows(run, subject, measured, samples)
            sections["stages"] = (f"the layers of {stages} stages", rows)
        splits = engine.name == "fsdp"
        parts = ranks // layout.replicas if splits else 1
        sections["size"] = (
            "traffic, memory, disk",
            [
                *plan.size_rows(
                    sizes,
                    ranks,
                    layout if splits else None,
                    engine.name == "deepspeed",
                ),
                *_token_rows(layout.context),
                *traffic_rows(run, sizes.payload),
                *checkpoint_rows(run, callbacks, sizes),
                *copy_rows(callbacks, sizes, engine.name, parts),
            ],
        )
        fits = tried = None
        if memory_gb is not None and measured is not None and measuring is not None:
            of_run = _fits_of(run, measured, measuring.left_out, sizes)
            tried = of_run.all(room_of(memory_gb))
            typed = TypedFit(
                subject.typed, subject.engine_name, subject.engine, read_launcher().name
            )
            rows, fits = fit_rows(tried, _left_out(of_run, subject.engine), memory_gb, typed)
            sections["engines"] = (f"which engine, in {memory_gb:g} GB", rows)
    layouts = [own.facts(room_of(memory_gb or 0)) for own in tried or ()]
    return Plan(
        subject.of,
        _ranks(engine),
        ranks,
        engine.name,
        sections,
        advice,
        fits,
        layouts,
    )


def _compiling_nothing(subject: Subject) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the modules of trainer.compile run as they are."""
    if not subject.requested.options.numerics.compile:
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


def _stage_rows(
    run: Run,
    subject: Subject,
    measured: MeasuredRun | None,
    samples: int,
) -> list[tuple[str, str]]:
    """Return rows on the stages of a pipeline, with the bytes of each if a step was measured."""
    schedule = schedule_in(subject.engine)
    layout = _layout_of(run, subject.engine)
    work = None
    needs = [0][:0]
    sample = sample_of(run)
    if sample is not None and not hasattr(run.task, "pipeline_stages"):
        work, _ = try_to_count(run.task, sample, run.engine.device)
    known = measured is not None and schedule.stages in measured.stages
    if measured is not None and known and layout.kind in measured.recordings:
        needs = [own.step for own in rank_bytes(measured, layout)]
    return stage_rows(run.task, schedule, layout.accumulate, layout.tensor, work, samples, needs)


def _layout_of(run: Run, engine: Mapping[str, Any]) -> Layout:
    """Return the layout that a run itself has.

    Args:
        engine: options of its engine.
    """
    replicas, tensor, stages, context = groups_of(engine)
    schedule = schedule_in(engine)
    return Layout(
        run.engine.ranks.world_size,
        "fsdp",
        gathers_once=engine.get("reshard_after_forward") is False,
        replicas=replicas,
        tensor=tensor,
        pipeline=stages,
        context=context,
        schedule=schedule.name,
        chunks=schedule.chunks,
        recomputes=bool(run.options.numerics.activation_checkpointing),
        accumulate=run.batch_plan.accumulate,
    )


def _left_out(fits: Fits, engine: Mapping[str, Any]) -> dict[str, str]:
    """Return what the rows leave out, with reasons."""
    if engine.get("param_dtype") is None:
        return fits.left_out
    reason = (
        "activations and gathered weights are counted in the weights' own dtype; with"
        f" {engine['param_dtype']} a rank needs less"
    )
    return fits.left_out | {"engine.param_dtype": reason}


def _step_rows(planned_run: Planned, subject: Subject) -> Sequence[tuple[str, str]]:
    asked = subject.requested.options.numerics.precision
    return plan.step_rows(planned_run.run, planned_run.hooks, asked)


def _fits_of(
    run: Run,
    measured: MeasuredRun,
    left_out: Mapping[str, str],
    sizes: plan.Sizes,
) -> Fits:
    """Return the layouts of a run whose steps have as many samples as this one's."""
    ranks = run.engine.ranks
    options = run.options.batch
    given = options.accumulate_grad_batches
    fixed = options.global_batch_size is None and not isinstance(given, dict)
    return Fits(
        measured,
        sizes,
        left_out,
        (ranks.world_size, ranks.local_size),
        run.batch_plan.accumulate * ranks.data_size,
        run.batch_plan.accumulate if fixed else None,
    )


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
