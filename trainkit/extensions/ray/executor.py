"""RayExecutor: calls a function on several ranks of a Ray cluster,
and returns its results by rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle

from trainkit.arguments import checked
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.elastic.driver import Driver
from trainkit.extensions.ray.actors import Actors
from trainkit.extensions.ray.cluster import connected
from trainkit.extensions.ray.job import run_job
from trainkit.extensions.ray.options import EXPLAINED, options_of, refuse_shared_gpus

_COMMAND = ("python", "-m", "trainkit.extensions.ray.call")


@checked
class RayExecutor:
    """Ranks for functions that call hvd.init(), or build a Trainer.

        with RayExecutor(num_workers=4) as ranks:
            results = ranks.run(train, args=(0.1,))

    With a fixed number, ranks are actors that live until the end: a second `run` starts at once.
    With two numbers the job is elastic: ranks are processes under the elastic driver, for functions
    that build a Trainer (with the callback Elastic), and lost ones are replaced.

    Args:
        num_workers: ranks; of two numbers, (least, most), the job begins with the first, and grows
            up to the second; (4, 4) replaces lost ranks of a fixed number.
        resources_per_worker: Ray's resources of a rank, as {"CPU": 2, "GPU": 1}; memory in bytes.
        placement_strategy: of the ranks' bundles: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        workers_per_bundle: ranks that share a bundle, and so a host.
        max_failures: elastic: so often ranks may be lost by crashes; None: any number.
        start_timeout_s: how long the ranks' resources may take to come.
        runtime_env: Ray's environment of the ranks.

    Raises:
        ConfigError: a setting is not legal.
    """

    explained_arguments = EXPLAINED

    def __init__(
        self,
        num_workers: int | Sequence[int] = 2,
        *,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: str = "PACK",
        workers_per_bundle: int = 1,
        max_failures: int | None = None,
        start_timeout_s: float = 600.0,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = options_of(
            "RayExecutor.",
            num_workers,
            resources_per_worker,
            placement_strategy,
            workers_per_bundle=workers_per_bundle,
            max_failures=max_failures,
            start_timeout_s=start_timeout_s,
            runtime_env=runtime_env,
        )
        self.is_elastic = not isinstance(num_workers, int)
        if max_failures and not self.is_elastic:
            raise ConfigError(
                f"RayExecutor.max_failures is {max_failures}, and num_workers={num_workers} is a"
                " fixed number of ranks: none is replaced, and the first error ends all. Give"
                f" num_workers=({num_workers}, {num_workers}), which is elastic, or leave it out."
            )
        self._actors: Actors | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> RayExecutor:
        """Connect to the cluster, and start the ranks of a fixed number.

        Raises:
            ConfigError: there is no such cluster, or the resources do not come in time.
        """
        refuse_shared_gpus("RayExecutor.", self.options)
        with contextlib.ExitStack() as stack:
            self.options = stack.enter_context(connected(self.options, "RayExecutor."))
            if not self.is_elastic:
                self._actors = Actors(self.options)
                stack.callback(self._actors.close)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._actors = None

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function on all ranks; return its results by rank; of an elastic job those of the
        ranks at its end.

        Args:
            fn: importable on the nodes, or defined in the script; it and its arguments are pickled
                (cloudpickle).
            args, kwargs: the same on all ranks.

        Raises:
            Exception: the first error that a rank's function raised; it ends all ranks.
            EngineError: the job ended without one, or an earlier error has ended the ranks.
        """
        if self.is_elastic:
            return self._run_elastic(fn, args, kwargs or {})
        return self._living().results(self.run_remote(fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Begin to call a function on all ranks of a fixed number; return Ray's references to the
        results, by rank.

        Raises:
            ConfigError: num_workers is two numbers.
            EngineError: an earlier error has ended the ranks.
        """
        if self.is_elastic:
            raise ConfigError(
                "RayExecutor.run_remote needs a fixed num_workers; use run, or a thread of your"
                " own."
            )
        return self._living().submit(fn, args, kwargs or {})

    def _living(self) -> Actors:
        if self._actors is None:
            raise EngineError(
                "RayExecutor has no ranks: use it as a context manager, `with RayExecutor(...) as"
                " ranks:`."
            )
        if not self._actors.is_alive:
            raise EngineError("An error has ended the ranks of this RayExecutor; make another one.")
        return self._actors

    def _run_elastic(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        if not ray.is_initialized():
            raise EngineError(
                "RayExecutor is not connected: use it as a context manager, `with RayExecutor(...)"
                " as ranks:`."
            )
        call = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
        drivers: list[Driver] = []
        code, left = run_job(
            self.options, _COMMAND, os.getcwd(), call=call, on_start=drivers.append
        )
        ends = sorted(
            (cloudpickle.loads(content) for content in left.values()), key=lambda end: end["at"]
        )
        errors = [end["error"] for end in ends if end["error"] is not None]
        if errors:
            raise errors[0]
        if code:
            over = drivers[0].state_machine.job.over
            assert over is not None
            raise EngineError(
                f"The ranks ended with exit code {code}, and no error of the function's:"
                f" {over.why}."
            )
        return [end["value"] for end in sorted(ends, key=lambda end: end["rank"]) if end["is_done"]]
