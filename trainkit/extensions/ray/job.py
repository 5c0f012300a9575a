"""Runs a command on several ranks of a Ray cluster,
under trainkit's elastic driver in this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ray

from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.elastic.driver import Driver, drive
from trainkit.extensions.elastic.messages import Rules, Words
from trainkit.extensions.elastic.network import Network
from trainkit.extensions.elastic.options import Settings
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.ray.backend import RayBackend, WorkerProgram
from trainkit.extensions.ray.cluster import free_and_total
from trainkit.extensions.ray.options import RayOptions, place_of_growth
from trainkit.extensions.ray.slots import EVERY_S, Slots
from trainkit.launch.shared_folder import token_in

_WORDS = Words(
    np="launcher.num_workers",
    min_np="launcher.num_workers",
    timeout="launcher.start_timeout_s",
    reset_limit="launcher.max_failures",
    reached="reached by Ray",
    lost="its actor or its node has ended",
    unassigned=(
        "the script calls hvd.init() itself, without the Trainer: such a function runs in"
        " trainkit.launch.ray.RayExecutor with a fixed num_workers"
    ),
)
_STARTED = time.strftime("%Y-%m-%d_%H-%M-%S")


def run_job(
    options: RayOptions,
    command: Sequence[str],
    folder: str,
    run_dir: str | None = None,
    call: bytes | None = None,
    *,
    needs_horovod: bool = True,
    environ: Mapping[str, str] | None = None,
    output: WorkerOutput | None = None,
    on_start: Callable[[Driver], None] = lambda driver: None,
) -> tuple[int, dict[str, bytes]]:
    """Run a command on the cluster that this process is connected to; return its exit code, and the
    workers' results.

    Args:
        options: of the ranks.
        command, run_dir, needs_horovod: see RayLauncher.run.
        folder: the folder in which workers start, on nodes that have it.
        call: a pickled function for the command, or None.
        environ: variables that are added to this process's.
        output: where the workers' output goes; None: to this process's.
        on_start: called with the driver before it starts workers, for signals that this process
            does not get itself.
    """
    rules = Rules(
        np=options.least,
        min_np=options.least,
        max_np=options.most,
        timeout_s=options.start_timeout_s,
        max_failures=options.max_failures,
        stop_s=options.stop_s,
        words=_WORDS,
    )
    environ = {"TRAINKIT_JOB_STARTED": _STARTED} | dict(os.environ) | dict(environ or {})
    output = output or WorkerOutput(None, False)
    at = None if options.runtime_env and "working_dir" in options.runtime_env else folder
    with contextlib.ExitStack() as stack:
        token = None
        if run_dir is not None:
            token = str(stack.enter_context(token_in(Path(run_dir), "job")))
        slots = stack.enter_context(contextlib.closing(Slots(options)))
        hosts = _first_hosts(slots, output)
        work = WorkerProgram(
            command,
            environ,
            at,
            token,
            run_dir or "",
            call,
            needs_horovod,
        )
        backend = RayBackend(slots, work)
        try:
            backend.check(hosts, options.start_timeout_s)
        except BaseException:
            backend.close()
            raise
        # each keeper finds its own node's interface
        network = Network(ray.util.get_node_ip_address(), ("lo",))
        driver = Driver(
            Settings(rules, tuple(command), environ, passes_on=True), network, output, backend
        )
        slots.on_head_lost = lambda: driver.post(
            lambda now: driver.state_machine.signalled(now, signal.SIGTERM)
        )
        on_start(driver)
        code = drive(driver, hosts, slots)
        if slots.is_head_lost and code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            # to disconnect, Ray would wait for the head, and then abort this process
            os._exit(code)
    if code is None:
        raise EngineError(f"The job was ended: {_WORDS.unassigned}.")
    return code, backend.results


def _first_hosts(slots: Slots, output: WorkerOutput) -> dict[str, int]:
    """Wait until the first ranks have their places.

    Raises:
        ConfigError: they have not in time.
    """
    options = slots.options
    if text := place_of_growth(options):
        output.say(text)
    end = time.monotonic() + options.start_timeout_s
    reported = False
    while sum((hosts := slots.ask()).values()) < options.least:
        if time.monotonic() > end:
            raise ConfigError(
                f"launcher.num_workers asks for {options.asked} ({options.strategy}), and they did"
                f" not come within {options.start_timeout_s:g} s (launcher.start_timeout_s);"
                f" {free_and_total(options)}. Ask for less, wait for other jobs to end, or add"
                " nodes."
            )
        if not reported and time.monotonic() > end - options.start_timeout_s + 2 * EVERY_S:
            output.say(
                f"waiting for {options.asked} ({options.strategy}); {free_and_total(options)}"
            )
            reported = True
        time.sleep(EVERY_S / 2)
    return hosts
