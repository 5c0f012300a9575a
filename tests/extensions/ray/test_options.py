"""What a user sets for ranks on Ray: what is legal, and how the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.ray import options as module
from trainkit.extensions.ray.options import (
    RayOptions,
    options_of,
    place_of_growth,
    refuse_shared_gpus,
    stop_seconds,
)

STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"


def options(**given: Any) -> RayOptions:
    """Options with the defaults of conf/launcher/ray.yaml."""
    defaults = {
        "num_workers": 2,
        "resources_per_worker": {"CPU": 1},
        "placement_strategy": "PACK",
        "workers_per_bundle": 1,
    }
    defaults |= {"max_failures": None, "start_timeout_s": 600.0, "runtime_env": None}
    return options_of("launcher.", **(defaults | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [[8, 2], 0, -1, [0, 2], [2], [1, 2, 3], "2", True, 2.0, None, [1, 2.5]]
)
def test_a_number_of_workers_is_one_or_two_numbers(given: Any) -> None:
    """Refused with key, value and what is legal."""
    with pytest.raises(
        ConfigError,
        match=r"launcher\.num_workers is .*; it must be a number of ranks, 1 or more, or two",
    ):
        options(num_workers=given)


def test_a_range_has_two_numbers() -> None:
    """[2, 8] begins with 2 and grows to 8; 2 is [2, 2]."""
    assert (options(num_workers=[2, 8]).least, options(num_workers=(2, 8)).most) == (2, 8)
    assert options(num_workers=2) == options(num_workers=[2, 2])


@pytest.mark.parametrize(
    "given", [{}, {"CPU": 0}, {"CPU": -1}, {"CPU": "2"}, {"GPU": float("inf")}, [1], {"CPU": True}]
)
def test_resources_are_numbers(given: Any) -> None:
    """One of them is above 0."""
    with pytest.raises(
        ConfigError,
        match=r"launcher\.resources_per_worker is .*; it must be a mapping of resources",
    ):
        options(resources_per_worker=given)


@pytest.mark.parametrize("name", ["gpu", "cpu", "Memory"])
def test_rays_own_names_are_asked_for(name: str) -> None:
    """{gpu: 1} would ask for a resource that no node has."""
    with pytest.raises(ConfigError, match=rf"has '{name}'; Ray's names are CPU, GPU and memory"):
        options(resources_per_worker={name: 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("placement_strategy", "pack"),
        ("workers_per_bundle", 0),
        ("workers_per_bundle", 3),
        ("max_failures", -1),
        ("start_timeout_s", 0),
        ("start_timeout_s", float("inf")),
        ("runtime_env", "pip"),
    ],
)
def test_the_other_settings_have_ranges(key: str, value: Any) -> None:
    """Each is refused by its key."""
    with pytest.raises(ConfigError, match=rf"launcher\.{key} is "):
        options(**{key: value})


def test_resources_become_those_of_bundles_and_actors() -> None:
    """Two workers a bundle need twice as much in it; an actor's options have Ray's names."""
    asked = options(
        num_workers=4,
        workers_per_bundle=2,
        resources_per_worker={"CPU": 2, "GPU": 0.5, "memory": 100, "spot": 1},
    )
    assert asked.bundle == {"CPU": 4, "GPU": 1, "memory": 200, "spot": 2}
    assert asked.actor == {"num_cpus": 2, "num_gpus": 0.5, "resources": {"spot": 1}, "memory": 100}
    assert asked.asked == "4 x {CPU: 2, GPU: 0.5, memory: 100, spot: 1}"


@pytest.mark.parametrize(
    ("program", "is_refused"),
    [("print(False)", True), ("print(True)", False), ("import nothing", True)],
)
def test_parts_of_a_gpu_are_refused_under_nccl(
    monkeypatch: pytest.MonkeyPatch, program: str, is_refused: bool
) -> None:
    """NCCL takes one rank for each GPU: several ranks with GPU: 0.5 are refused, unless Horovod
    sums by CUDA without NCCL.
    """
    monkeypatch.setattr(module, "_SHARES", program)
    given = options(resources_per_worker={"GPU": 0.5})
    if is_refused:
        with pytest.raises(
            ConfigError, match=r"asks for 0\.5 of a GPU for each of 2 ranks; NCCL takes one rank"
        ):
            refuse_shared_gpus("launcher.", given)
    else:
        refuse_shared_gpus("launcher.", given)


def test_whole_gpus_and_single_ranks_need_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started to find out about NCCL."""
    monkeypatch.setattr(module, "_SHARES", "print(False)")
    refuse_shared_gpus("launcher.", options(resources_per_worker={"GPU": 1}))
    refuse_shared_gpus("launcher.", options(num_workers=1, resources_per_worker={"GPU": 0.5}))


@pytest.mark.parametrize(
    ("name", "text"),
    [("use_gpu", "resources_per_worker="), ("min_workers", r"num_workers=\[least, most\]")],
)
def test_names_of_ray_and_horovod_are_explained(name: str, text: str) -> None:
    """use_gpu is that of ScalingConfig, min_workers of Horovod's ElasticRayExecutor."""
    executor = pytest.importorskip("trainkit.extensions.ray.executor", reason="ray is missing")
    with pytest.raises(ConfigError, match=rf"RayExecutor\.{name}: .*{text}"):
        executor.RayExecutor(**{name: True})


@pytest.mark.parametrize(
    ("given", "seconds"), [({}, 30), ({STOP_WAIT: "120"}, 115), ({STOP_WAIT: "4"}, 1)]
)
def test_ranks_have_as_long_as_ray_waits_for_the_driver(
    given: dict[str, str], seconds: float
) -> None:
    """Less what the driver itself takes; 30 s if Ray says nothing."""
    assert stop_seconds(given) == seconds


def test_a_wait_that_ray_cannot_read_is_refused() -> None:
    """Ray would read it when the job is to stop, and fail there."""
    with pytest.raises(ConfigError, match="RAY_JOB_STOP_WAIT_TIME_S is '60s'; it must be a whole"):
        stop_seconds({STOP_WAIT: "60s"})


def test_one_host_of_a_range_is_refused() -> None:
    """STRICT_PACK held for the first ranks; those of the range came on any host."""
    with pytest.raises(ConfigError, match=r"placement_strategy is STRICT_PACK, .*num_workers is"):
        options(num_workers=[2, 4], placement_strategy="STRICT_PACK")
    assert options(num_workers=[4, 4], placement_strategy="STRICT_PACK").most == 4


@pytest.mark.parametrize(
    ("num_workers", "strategy", "expected"),
    [([2, 4], "STRICT_SPREAD", True), (4, "STRICT_SPREAD", False), ([2, 4], "PACK", False)],
)
def test_a_line_says_where_a_range_grows(num_workers: Any, strategy: str, expected: bool) -> None:
    """Bundles that come later may share a host, whatever the first ones do."""
    line = place_of_growth(options(num_workers=num_workers, placement_strategy=strategy))
    assert ("may share a host" in line) is expected
