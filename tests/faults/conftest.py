"""The short fault set: what `make test` runs of this folder. The rest is marked slow, and runs with `make slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# Each launcher, each kind of death (SIGKILL, SIGTERM, a freeze, an exception), and each way to recover: a restart by the user
# or by torchrun, from a checkpoint or from a commit in memory, with a rank fewer and with one more; faults while ranks write a
# checkpoint in parts; and a short storm.
SHORT = {
    "test_init_cycles.py::test_init_can_be_repeated_with_horovods_own_settings",
    "test_init_cycles.py::test_float16_is_summed_exactly[40001]",
    "test_kills.py::test_a_signal_on_any_rank_ends_all_with_a_checkpoint[15-1]",
    "test_launchers.py::test_a_rank_that_is_killed_under_horovodrun_costs_a_restart",
    "test_launchers.py::test_torchruns_restart_goes_on",
    "test_elastic.py::test_a_killed_worker_of_a_single_host_is_done_without_and_replaced[0]",
    "test_elastic.py::test_workers_that_are_all_killed_go_on_from_the_checkpoint",
    "test_elastic.py::test_a_host_that_comes_takes_part",
    "test_elastic.py::test_a_frozen_worker_is_replaced",
    "test_elastic.py::test_an_error_of_the_users_ends_the_job_with_its_code",
    "test_parts.py::test_a_rank_that_is_killed_while_it_writes[1]",
    "test_parts.py::test_a_disk_that_is_full_on_one_rank",
    "test_storm.py::test_a_job_survives_a_short_storm",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not in the short set."""
    for item in items:
        if item.path.parent == FOLDER and f"{item.path.name}::{item.name}" not in SHORT:
            item.add_marker(pytest.mark.slow)
