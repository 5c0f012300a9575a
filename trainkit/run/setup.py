"""Stage: everything around a fit, validate, test or predict.

enter   engine started, device pinned -> settings compared over ranks -> torch's flags -> run folder agreed, it
        and URLs of checkpoints locked -> hooks -> data prepared and set up -> model made
exit    on_exception after an error; teardown; feeds closed; the engine released
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from trainkit.api.callback import Callback
from trainkit.api.datamodule import StageName
from trainkit.api.options import Options
from trainkit.api.state import TrainState
from trainkit.api.task import Task
from trainkit.api.view import with_role
from trainkit.checkpoint.manager import CheckpointManager
from trainkit.checkpoint.writer import Writer
from trainkit.collector import collect_as_usual
from trainkit.console import warning
from trainkit.device.torch_flags import keep_freed_memory, torch_flags
from trainkit.engine.base import Engine
from trainkit.engine.collectives import PeerError
from trainkit.engine.coordinator import Coordinator
from trainkit.engine.ranks import RanksChanged
from trainkit.engine.select import make_engine
from trainkit.engine.signals import Signals
from trainkit.errors import ConfigError, Dismissed, Preempted
from trainkit.extension import remarks
from trainkit.launch.terminal import output_of_rank
from trainkit.metrics.objects import reset_metrics
from trainkit.run.data_sources import DataSources
from trainkit.run.elastic import ElasticState
from trainkit.run.folder import agreed_run_dir
from trainkit.run.lightning_names import explain_missing
from trainkit.run.lock import RunLock
from trainkit.run.model import make_model
from trainkit.run.replicas import Replicas, settings_of
from trainkit.run.reused import ReusedParts
from trainkit.run.run import Run
from trainkit.run.stage_feeds import StageFeeds

# a rank 0 that an elastic job has lost may be writing its last checkpoint, or hang until it is
# killed
_LOCK_TIMEOUT_S = 60.0


class Stage:
    """See the module. A context manager; nothing starts before it is entered.

    Args:
        elastic: of the attempts that this one belongs to, if a callback asks for an elastic run.
        has_data: whether the data needs no preparation.

    Attributes:
        callbacks: of the run.
        elastic: state that outlives this attempt of an elastic run.
        signals: that this process received.
        state: counters of the run; on a rank that takes no part they stay at 0.
        feeds: of the run, once there is one.
        replicas: compares what must be equal on all ranks.
        kept: what outlives this attempt of an elastic run and is made once; of a rehearsal it is
            set, and `elastic` is not.
    """

    def __init__(
        self,
        kind: StageName,
        task: Task,
        data: DataSources,
        callbacks: Sequence[Callback],
        options: Options,
        elastic: ElasticState | None = None,
        has_data: bool = False,
    ) -> None:
        self.kind = kind
        self.task = task
        self.data = data
        self.options = options
        self.has_data = has_data
        requested = options.engine
        self.engine = requested if isinstance(requested, Engine) else make_engine(requested)
        self.callbacks = callbacks
        self.state = TrainState(phase=kind)
        self._run: Run | None = None
        # whether a later attempt of this process continues with the Task
        self.is_set_up = self._continues = False
        self._stack = contextlib.ExitStack()
        self.elastic = elastic
        self.reused: ReusedParts | None = None
        if elastic is not None:
            elastic.attempt = self
            self.reused = elastic.reused
            self.engine.ranks.committed_step = elastic.memory.step
        elif kind == "fit" and self.engine.ranks.is_elastic:
            raise ConfigError(
                "This job is elastic (horovodrun --min-np or --host-discovery-script, `trainkit"
                " launch`), but its fit cannot continue when ranks change. Add callbacks=elastic"
                " (Trainer: callbacks=[trainkit.Elastic()]), or start it with plain horovodrun or"
                " torchrun."
            )
        self.signals = Signals() if self.elastic is None else self.elastic.signals
        self._coordinator = Coordinator(self.engine, self.signals)
        self.replicas = Replicas(
            self.engine.comm, None if self.elastic is None else self.elastic.facts
        )

    @property
    def is_open(self) -> bool:
        """Whether there is a run: the stage was entered, and this rank takes part."""
        return self._run is not None

    @property
    def run(self) -> Run:
        """The run that hooks see, once the stage has an engine and a folder; build_run gives it the
        parts of a fit.

        Raises:
            ConfigError: there is none.
        """
        if self._run is None:
            raise ConfigError(
                "There is no run here: its engine has not started, or engine.process_set leaves"
                " this rank out."
            )
        return self._run

    @property
    def is_elastic(self) -> bool:
        """Whether this fit continues when its ranks change."""
        return self.elastic is not None and self.engine.ranks.is_elastic

    @property
    def is_resumed_here(self) -> bool:
        """Whether an earlier attempt of this process set up the Task and its data."""
        return self.elastic is not None and self.elastic.is_resumed_here

    @property
    def _is_later_attempt(self) -> bool:
        return self.is_resumed_here or self.engine.ranks.joins_late

    @property
    def checkpoints(self) -> CheckpointManager:
        """Of the run."""
        return self.run.checkpoints

    def __enter__(self) -> Stage:
        collect_as_usual()
        self._stack.enter_context(output_of_rank())
        try:
            self._announce()
            self.engine.__enter__()
            if self.engine.ranks.takes_part:
                self._set_up()
        except BaseException as error:
            explain_missing(error)
            # an elastic fit reports what no later attempt mends
            if self._run is not None and self.elastic is None:
                self._run.hooks("on_exception", error)
            self._stack.close()
            raise
        return self

    def _announce(self) -> None:
        """Announce the fit to the launcher;
        prepare all now that this process can prepare alone, if it joins other ranks.
        """
        state = self.elastic
        if state is not None and state.has_begun:
            self.has_data = state.is_rehearsed
            return
        self.engine.ranks.begin(self.kind)
        if self.engine.ranks.joins_late and state is not None:
            state.rehearse(self)
            self.has_data = True
        if state is not None:
            state.has_begun, state.is_rehearsed = True, self.has_data

    def _set_up(self) -> None:
        engine, numerics, data = self.engine, self.options.numerics, self.data.datamodule
        self.replicas.compare(
            "settings", lambda: settings_of(self.task, data, self.options, engine, self.callbacks)
        )
        writer = Writer() if self.elastic is None else self.elastic.writer
        if not engine.ranks.is_main:
            writer.wait()  # of a former rank 0: the files are another's from here on
        self._stack.enter_context(
            torch_flags(
                numerics.deterministic,
                numerics.benchmark,
                numerics.detect_anomaly,
                numerics.float32_matmul_precision,
            )
        )
        if engine.device.type == "cpu":
            self._stack.enter_context(keep_freed_memory())
        run_dir = self._agree_on_folder()
        self._stack.enter_context(output_of_rank()).report_in(
            run_dir / "logs" / f"rank-{engine.ranks.rank}.txt"
        )
        writer.on_wait = engine.heartbeat.count_progress
        self._run = run = Run(
            self.state,
            self.task,
            self.options,
            self.callbacks,
            engine,
            run_dir=run_dir,
            coordinator=self._coordinator,
            writer=writer,
            datamodule=data,
            elastic=self.elastic if self.is_elastic else None,
        )
        self.feeds = StageFeeds(run, self.data)
        if self.kind == "fit" and not _is_rehearsal(self):
            for store in run.checkpoints.stores:
                on_main = engine.comm.run_on_main
                held = store.held(run.run_dir, on_main, self._is_later_attempt)
                self._stack.enter_context(held)
        for owner in self.data.owners(self.task):
            owner._trainer = run
        self._prepare_data()
        self._stack.enter_context(run.hooks.fixed())
        make_model(self.task, engine, with_role(self.callbacks, "layers"))
        reset_metrics(self.task)  # counts of an interrupted run do not belong to this one
        self.is_set_up = True
        if self.elastic is not None:
            self.elastic.run_dir = run_dir

    def report(self) -> None:
        """Say what extensions remark about the fit that begins, once a job."""
        if not self._is_later_attempt:
            for text in remarks(self.run):
                self.run.say(text)

    def _agree_on_folder(self) -> Path:
        if _is_rehearsal(self):
            # not made: the process may be killed before it could remove it
            return Path(str(self.options.run_dir))
        requested = (self.elastic and self.elastic.run_dir) or self.options.run_dir
        is_needed = self.is_elastic or self.kind == "predict"
        run_dir = agreed_run_dir(
            requested, type(self.task).__name__, self.engine, self.callbacks, is_needed
        )
        if self.kind == "fit":
            lock = self._stack.enter_context(RunLock())
            self.engine.comm.run_on_main(
                lambda: lock.take(run_dir, _LOCK_TIMEOUT_S * self._is_later_attempt)
            )
        return run_dir

    def _prepare_data(self) -> None:
        prepared = self.is_resumed_here or self.has_data
        for source in () if prepared else self.data.owners(self.task):
            ranks = self.engine.ranks
            # a DataModule of Lightning's may lack it
            per_host = getattr(source, "prepare_data_per_node", True)
            if ranks.local_rank == 0 if per_host else ranks.is_main:
                source.prepare_data()
        self.engine.comm.barrier()
        if self.is_resumed_here or (self.elastic is not None and self.elastic.is_rehearsed):
            self.run.hooks.of_callbacks("setup", self.kind)
            return
        if self.data.datamodule is not None and not self.has_data:
            self.data.datamodule.setup(self.kind)
        self.run.hooks("setup", self.kind)

    def enter(self, context: contextlib.AbstractContextManager[None]) -> None:
        """Enter a context until the stage ends."""
        self._stack.enter_context(context)

    def enter_once(self, context: contextlib.AbstractContextManager[None]) -> None:
        """Enter a context until the stage ends, in an elastic run until all attempts have."""
        (self.enter if self.reused is None else self.reused.enter_once)(context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._continues = _is_rehearsal(self) or (
            self.is_elastic and (isinstance(error, RanksChanged) or self.engine.comm.is_loss(error))
        )
        lost_peer = isinstance(error, PeerError) and not self._continues
        if self._continues or isinstance(error, Preempted):
            kind = error = trace = None
        explain_missing(error)
        try:
            if self.engine.ranks.takes_part:
                self._tear_down(error)
        finally:
            if self._run is not None:
                self.feeds.close()
            if self._run is not None and self._continues:
                self._run.end()
            self._stack.close()
            self.engine.__exit__(kind, error, trace)
        # the launcher ends this rank: the one that failed has reported why
        if lost_peer and self.kind == "fit":
            self.signals.raise_again()

    def _tear_down(self, error: BaseException | None) -> None:
        run, fits = self.run, self.kind == "fit"
        if error is None and fits and not self._continues:
            with contextlib.suppress(PeerError):  # a rank that has ended by now has done its part
                run.coordinator.settle()  # nothing is in flight when the next fit begins
        if error is not None:
            run.hooks("on_exception", error)
        self.task._log_to(None)
        if self._continues:
            # the next attempt continues with the Task, and with the writing
            run.hooks.of_callbacks("teardown", self.kind)
            return
        run.hooks("teardown", self.kind)
        if self.data.datamodule is not None:
            self.data.datamodule.teardown(self.kind)
        if fits:
            self._finish_writing(error)

    def _finish_writing(self, error: BaseException | None) -> None:
        try:
            self.run.checkpoints.finish()
        except Exception as failed:
            if error is None:
                raise
            warning(f"The last checkpoint failed too: {type(failed).__name__}: {failed}")

    def fail(self, error: BaseException) -> None:
        """End a fit that no later attempt continues."""
        if not isinstance(error, (Dismissed, Preempted)):
            self.run.hooks("on_exception", error)
        self.run.hooks.of_task("teardown", self.kind)
        if self.data.datamodule is not None:
            self.data.datamodule.teardown(self.kind)


def _is_rehearsal(stage: Stage) -> bool:
    return stage.reused is not None and stage.elastic is None
