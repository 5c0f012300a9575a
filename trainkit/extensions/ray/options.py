"""What a user sets for ranks on Ray, checked. Imports no ray."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.arguments import show
from trainkit.errors import ConfigError

# of the command of ranks under the elastic driver
ELASTIC = "callbacks.elastic._target_=trainkit.callbacks.Elastic"
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_RESOURCES = "resources_per_worker={CPU: 2, GPU: 1} says what each rank takes"
# names of Ray's ScalingConfig and of Horovod's RayExecutor -> what to use here
EXPLAINED = {
    "use_gpu": _RESOURCES,
    "num_cpus": _RESOURCES,
    "num_gpus": _RESOURCES,
    "cpus_per_worker": _RESOURCES,
    "gpus_per_worker": _RESOURCES,
    "num_hosts": "num_workers is that of all hosts, with placement_strategy=STRICT_SPREAD and"
    " workers_per_bundle as many as on each host",
    "num_workers_per_host": "workers_per_bundle is so many, with placement_strategy=STRICT_SPREAD",
    "min_workers": "num_workers=[least, most] is elastic",
    "max_workers": "num_workers=[least, most] is elastic",
    "reset_limit": "max_failures is the number of ranks that may be lost",
    "elastic_timeout": "start_timeout_s is how long too few ranks are waited for",
    "extra_env_vars": "runtime_env={env_vars: {NAME: value}} sets variables of the ranks",
    "address": "the variable RAY_ADDRESS names the cluster",
}
_SHARES = "import horovod.torch as hvd; print(hvd.cuda_built() and not hvd.nccl_built())"
# Ray's own: seconds between SIGTERM and SIGKILL for the driver of a submitted job
_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
_DRIVER_S = 5  # of them, for the driver itself


@dataclass(frozen=True)
class RayOptions:
    """Checked options.

    Attributes:
        least, most: numbers of workers: at the start, and at most.
        resources: of each worker, by Ray's names.
        strategy: placement of the first workers' bundles.
        per_bundle: workers that share a bundle, and so a host.
        max_failures: generations that may end by a crash; None: any number.
        start_timeout_s: how long too few workers may be there.
        runtime_env: Ray's, or None.
        is_joined: whether the connection to Ray is the caller's own, which knows no runtime_env of
            ours: then each actor has it.
        stop_s: so long ranks may take to end after a signal.
    """

    least: int
    most: int
    resources: Mapping[str, float]
    strategy: str = "PACK"
    per_bundle: int = 1
    max_failures: int | None = None
    start_timeout_s: float = 600.0
    runtime_env: Mapping[str, Any] | None = None
    is_joined: bool = False
    stop_s: float = 30.0

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one bundle."""
        return {name: amount * self.per_bundle for name, amount in self.resources.items()}

    @property
    def actor(self) -> dict[str, Any]:
        """The resources of one worker, and its environment, as an actor's options."""
        named = {
            name: amount
            for name, amount in self.resources.items()
            if name not in ("CPU", "GPU", "memory")
        }
        options: dict[str, Any] = {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "resources": named,
        }
        if "memory" in self.resources:
            options["memory"] = self.resources["memory"]
        if self.is_joined and self.runtime_env:
            options["runtime_env"] = dict(self.runtime_env)
        return options

    @property
    def asked(self) -> str:
        """The request in words."""
        return f"{self.least} x {shown(self.resources)}"


def options_of(
    key: str,
    num_workers: int | Sequence[int],
    resources_per_worker: Mapping[str, float] | None = None,
    placement_strategy: str = "PACK",
    *,
    workers_per_bundle: int = 1,
    max_failures: int | None = None,
    start_timeout_s: float = 600.0,
    runtime_env: Mapping[str, Any] | None = None,
) -> RayOptions:
    """Check what a user set; `key` begins the names of settings in messages, as "launcher.". A
    worker takes a CPU by default.

    Raises:
        ConfigError: a setting is not legal.
    """
    least, most = _workers(key, num_workers)
    given = {"CPU": 1} if resources_per_worker is None else resources_per_worker
    resources = resources_of(f"{key}resources_per_worker", given)
    if placement_strategy not in STRATEGIES:
        raise ConfigError(
            f"{key}placement_strategy is '{placement_strategy}'; it must be one of"
            f" {', '.join(STRATEGIES)}."
        )
    if placement_strategy == "STRICT_PACK" and least < most:
        raise ConfigError(
            f"{key}placement_strategy is STRICT_PACK, one host, and {key}num_workers is"
            f" {show(num_workers)}: ranks that are added later come on any host. Give a number of"
            " ranks, or PACK, which prefers one host."
        )
    if (
        not _is_count(workers_per_bundle)
        or workers_per_bundle < 1
        or least % workers_per_bundle
        or most % workers_per_bundle
    ):
        raise ConfigError(
            f"{key}workers_per_bundle is {show(workers_per_bundle)}; it must be a whole number, 1"
            f" or more, that divides {key}num_workers, which is {show(num_workers)}."
        )
    if max_failures is not None and (not _is_count(max_failures) or max_failures < 0):
        raise ConfigError(
            f"{key}max_failures is {show(max_failures)}; it must be 0 or more, or null for no"
            " limit."
        )
    if not isinstance(start_timeout_s, (int, float)) or not 0 < start_timeout_s < math.inf:
        raise ConfigError(
            f"{key}start_timeout_s is {show(start_timeout_s)}; it must be a number of seconds"
            " above 0."
        )
    if runtime_env is not None and not isinstance(runtime_env, Mapping):
        raise ConfigError(
            f"{key}runtime_env is {show(runtime_env)}; it must be a mapping as Ray takes it, or"
            " null."
        )
    options = (placement_strategy, workers_per_bundle, max_failures, float(start_timeout_s))
    return RayOptions(least, most, resources, *options, dict(runtime_env) if runtime_env else None)


def place_of_growth(options: RayOptions) -> str:
    """Return that a strategy does not hold for ranks that a range adds, or ""."""
    if options.strategy != "STRICT_SPREAD" or options.least == options.most:
        return ""
    return (
        f"placement_strategy is STRICT_SPREAD: it holds for the first {options.least} ranks, and"
        " bundles that num_workers adds later may share a host"
    )


def stop_seconds(environ: Mapping[str, str]) -> float:
    """Return how long ranks may take to end after a signal: almost as long as Ray waits for the
    driver of a submitted job, if RAY_JOB_STOP_WAIT_TIME_S says it.

    Args:
        environ: of the driver, which has that of its node.

    Raises:
        ConfigError: the variable is not a number, with which Ray could not stop the job.
    """
    text = environ.get(_STOP_WAIT, "").strip()
    if text and not text.isdecimal():
        raise ConfigError(
            f"{_STOP_WAIT} is '{text}'; it must be a whole number of seconds, as 120: so long Ray"
            " waits after SIGTERM before it kills the driver of a submitted job."
        )
    return max(1.0, float(text) - _DRIVER_S) if text else RayOptions.stop_s


def refuse_shared_gpus(key: str, options: RayOptions) -> None:
    """Refuse parts of a GPU for several ranks: NCCL takes one rank for each GPU, and a Horovod
    without CUDA takes no GPU.

    Raises:
        ConfigError: they are asked for, and Horovod here does not sum by CUDA without NCCL.
    """
    gpus = options.resources.get("GPU", 0)
    if gpus == int(gpus) or options.most == 1:
        return
    done = subprocess.run(
        [sys.executable, "-c", _SHARES], capture_output=True, text=True, check=False
    )
    if done.returncode or done.stdout.strip() != "True":
        raise ConfigError(
            f"{key}resources_per_worker asks for {gpus:g} of a GPU for each of {options.most}"
            " ranks; NCCL takes one rank for each GPU, and Horovod without NCCL takes none. Give"
            " whole GPUs (GPU: 1), one rank, or ranks without GPU (GPU: 0)."
        )


def shown(resources: Mapping[str, float]) -> str:
    """Write resources as a user does: {CPU: 2, GPU: 1}."""
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"


def _workers(key: str, given: int | Sequence[int]) -> tuple[int, int]:
    two = (
        (given, given)
        if _is_count(given)
        else tuple(given)
        if isinstance(given, (list, tuple))
        else ()
    )
    if len(two) != 2 or not all(_is_count(n) for n in two) or not 1 <= two[0] <= two[1]:
        raise ConfigError(
            f"{key}num_workers is {show(given)}; it must be a number of ranks, 1 or more, or two,"
            " [least, most], the smaller first: the job begins with the first number, and grows up"
            " to the second."
        )
    return two[0], two[1]


def resources_of(key: str, given: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of a rank that are above 0; `key` begins messages.

    Raises:
        ConfigError: there is none, or a name is not as Ray writes it.
    """
    legal = isinstance(given, Mapping) and all(
        isinstance(name, str)
        and isinstance(amount, (int, float))
        and not isinstance(amount, bool)
        and 0 <= amount < math.inf
        for name, amount in given.items()
    )
    resources = {name: amount for name, amount in given.items() if amount} if legal else {}
    if not resources:
        raise ConfigError(
            f"{key} is {show(given)}; it must be a mapping of resources to numbers, one of them"
            " above 0, as {CPU: 2, GPU: 1}; memory is in bytes."
        )
    if wrong := [
        name
        for name in resources
        if name.upper() in ("CPU", "GPU", "MEMORY") and name not in ("CPU", "GPU", "memory")
    ]:
        raise ConfigError(f"{key} has '{wrong[0]}'; Ray's names are CPU, GPU and memory.")
    return resources


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
