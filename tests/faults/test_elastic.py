"""Elastic training under a real horovodrun with a discovery script:
workers die, hosts come and go, and no sample is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import ROOT, WORKERS, free_port, wait_for
from tests.faults.workers.elastic_job import SAMPLES
from tests.helpers.launching import run_command

pytestmark = pytest.mark.parallel

JOB = WORKERS / "elastic_job.py"
EPOCHS = 5
STEPS = EPOCHS * SAMPLES // 8  # a step takes 8 samples: two ranks of 4


@dataclass
class Ended:
    """A job that has ended.

    Attributes:
        code: horovodrun's.
        text: what it said.
        lines: of all journals, by the processes' ids.
        ends: what the processes that came to the end wrote, by id.
        rows: of metrics.csv.
    """

    code: int
    text: str
    lines: dict[int, list[dict[str, Any]]]
    ends: dict[int, dict[str, Any]]
    rows: list[str]

    @property
    def sizes(self) -> list[int]:
        """The number of ranks in each generation that trained, in order."""
        return [
            size
            for _, size in sorted(
                {
                    line["generation"]: line["ranks"] for own in self.lines.values() for line in own
                }.items()
            )
        ]

    @property
    def pause_s(self) -> list[float]:
        """Seconds from the last batch of a generation to the first one of the next."""
        times: dict[int, list[float]] = {}
        for own in self.lines.values():
            for line in own:
                times.setdefault(line["generation"], []).append(line["t"])
        order = [times[generation] for generation in sorted(times)]
        return [min(after) - max(before) for before, after in zip(order, order[1:], strict=False)]


Run = Callable[..., Ended]


def start(tmp_path: Path) -> Run:
    """Return a function that runs a job to its end in this folder."""

    def run(
        *faults: dict[str, Any],
        hosts: str = "localhost:2",
        np: int = 2,
        options: str = "",
        start_with: str = "horovodrun --gloo",
        **settings: Any,
    ) -> Ended:
        (tmp_path / "hosts.txt").write_text(hosts.replace(",", "\n") + "\n")
        script = tmp_path / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts.txt\n")
        script.chmod(0o755)
        for fault in faults:
            if "host" in fault:
                fault["hosts_file"] = str(tmp_path / "hosts.txt")
        settings = {
            "faults": list(faults),
            "commit": 3,
            "every": None,
            "epochs": EPOCHS,
            "stall_s": 120,
            "waits_for": np,
            "slow_s": 0,
        } | settings
        elastic = (
            f"-np {np} --min-np 1 --max-np 4 --host-discovery-script {script}" if np else "-np 2"
        )
        run_dir = tmp_path / "run"
        line = f"{start_with} {elastic} {options} python {JOB} {run_dir} '{json.dumps(settings)}'"
        done = run_command(line, tmp_path, 300, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        return read(done.code, done.text, run_dir)

    return run


def read(code: int, text: str, run_dir: Path) -> Ended:
    """Return what a job left behind."""
    journals = {int(path.stem.partition("-")[2]): path for path in run_dir.glob("journal-*.jsonl")}
    lines = {
        pid: [json.loads(line) for line in path.read_text().splitlines()]
        for pid, path in journals.items()
    }
    ends = {
        int(path.stem.partition("-")[2]): json.loads(path.read_text())
        for path in run_dir.glob("end-*.json")
    }
    metrics = run_dir / "metrics.csv"
    return Ended(
        code, text, lines, ends, metrics.read_text().splitlines() if metrics.exists() else []
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a job to its end."""
    return start(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The same fit to which nothing happens, on two ranks, not elastic."""
    return start(tmp_path_factory.mktemp("undisturbed"))(np=0)


def check_samples(ended: Ended) -> None:
    """Each epoch's steps, as they were trained last, hold each sample once,
    and the ranks end alike.
    """
    assert ended.code == 0, ended.text
    last: dict[tuple[int, int], dict[int, list[int]]] = {}
    for own in ended.lines.values():
        for line in own:
            by_generation = last.setdefault((line["epoch"], line["step"]), {})
            by_generation.setdefault(line["generation"], []).extend(line["ids"])
    for epoch in range(EPOCHS):
        ids = [i for (of, _), parts in last.items() if of == epoch for i in parts[max(parts)]]
        assert sorted(ids) == list(range(SAMPLES)), f"epoch {epoch}\n{ended.text}"
    ends = list(ended.ends.values())
    assert ends and all(end == ends[0] for end in ends), "the ranks' last weights differ"


def check(ended: Ended, undisturbed: Ended) -> None:
    """The job trained each sample once an epoch, to the weights of the undisturbed job,
    with one history in its files.
    """
    check_samples(ended)
    expected = next(iter(undisturbed.ends.values()))
    first = next(iter(ended.ends.values()))
    assert first["step"] == STEPS
    assert first["weights"] == pytest.approx(expected["weights"], rel=1e-4)
    assert _rounded(ended.rows) == _rounded(undisturbed.rows)
    for pid, own in ended.lines.items():
        assert [line["generation"] for line in own] == sorted(line["generation"] for line in own)
        assert own, pid


def _rounded(rows: list[str]) -> list[list[str]]:
    return [
        [f"{float(cell):.4f}" if "." in cell else cell for cell in row.split(",")] for row in rows
    ]


def survivors(ended: Ended) -> set[int]:
    """Return the processes that were there from the first generation to the end."""
    return {pid for pid, own in ended.lines.items() if own and own[0]["generation"] == 1} & set(
        ended.ends
    )


def test_an_undisturbed_elastic_job_is_the_plain_one(run: Run, undisturbed: Ended) -> None:
    """An elastic job without faults trains what the plain job trains."""
    ended = run()
    check(ended, undisturbed)
    assert ended.sizes == [2] and len(survivors(ended)) == 2


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_worker_of_a_single_host_is_done_without_and_replaced(
    run: Run, undisturbed: Ended, rank: int
) -> None:
    """The surviving worker continues alone in its process until the replacement joins,
    whichever rank was killed. Preparing takes a second here: else it might join at once.
    """
    ended = run({"do": "kill", "rank": rank, "step": 10}, slow_s=0.5)
    print(
        f"from the last batch before the kill to the first one after it: {ended.pause_s[0]:.2f} s"
    )
    check(ended, undisturbed)
    assert ended.sizes == [2, 1, 2] and len(survivors(ended)) == 1
    assert "killed by SIGKILL" in ended.text


@pytest.mark.parametrize("rank", [1, 0])
def test_ranks_that_step_alone_continue_from_the_last_outer_step(
    run: Run, rank: int, tmp_path: Path
) -> None:
    """A lost rank costs the steps since then (8 here, of an outer step each 4):
    they are taken again, and counted as such. The survivor meets the loss at its next outer step;
    on a busy machine the replacement is there by then.
    """
    ended = run({"do": "kill", "rank": rank, "step": 10}, every_n_steps=4)
    check_samples(ended)
    assert ended.sizes in ([2, 1, 2], [2, 2]) and len(survivors(ended)) == 1
    (survivor,) = survivors(ended)
    steps = [(line["generation"], line["step"]) for line in ended.lines[survivor]]
    assert min(step for generation, step in steps if generation > 1) == 8, steps
    assert max(step for generation, step in steps if generation == 1) >= 9, steps
    goodput = json.loads((tmp_path / "run" / "goodput.json").read_text())
    assert goodput["ranks"][0] == [0, 2]
    if ended.sizes[1] == 1:
        assert goodput["ranks"][1] == [8, 1]
    # a rank 0 that is killed has not written its last steps
    assert goodput["seconds"]["repeating"] > 0 or rank == 0


def test_workers_that_are_all_killed_resume_from_the_checkpoint(
    run: Run, undisturbed: Ended
) -> None:
    """If all workers are killed, their replacements resume from the last checkpoint."""
    ended = run({"do": "kill", "rank": 0, "step": 20}, {"do": "kill", "rank": 1, "step": 20})
    check(ended, undisturbed)
    assert not survivors(ended) and len(ended.ends) == 2


@pytest.mark.parametrize(
    ("during", "settings"),
    [
        ("saving", {"commit": 3}),
        ("saving", {"commit": 1000, "every": 5}),
        ("validation", {}),
        ("recovery", {}),
    ],
)
def test_a_worker_may_be_killed_at_any_time(
    run: Run, undisturbed: Ended, during: str, settings: dict[str, Any]
) -> None:
    """A kill during a commit, a save, a validation or a recovery loses no sample."""
    faults: list[dict[str, Any]] = [{"do": "kill", "rank": 1, "step": 8, "during": during}]
    if during == "recovery":  # to the commit of step 6
        faults[0]["step"] = 6
        faults.insert(0, {"do": "kill", "rank": 2, "step": 7})
        ended = run(*faults, np=3, hosts="localhost:3")
        check_samples(ended)
        assert len(survivors(ended)) == 1, ended.text
        return
    ended = run(*faults, **settings)
    check(ended, undisturbed)
    assert len(survivors(ended)) == 1


def test_a_host_that_comes_takes_part(run: Run, undisturbed: Ended) -> None:
    """When a host joins, the ranks commit, and three ranks continue without a lost step."""
    ended = run({"do": "add_host", "step": 5, "host": "127.0.0.1:1"}, waits_for=3)
    check(ended, undisturbed)
    assert ended.sizes == [2, 3] and len(survivors(ended)) == 2
    seen = [
        (line["epoch"], line["step"], i)
        for own in ended.lines.values()
        for line in own
        for i in line["ids"]
    ]
    assert len(seen) == len(set(seen)), "a step was trained twice, though no worker was lost"


def test_a_newcomer_that_prepares_for_long_keeps_the_others_training(
    run: Run, undisturbed: Ended
) -> None:
    """Its `setup` and `configure_optimizers` take 6 s each,
    and the others pause for less than one of them.
    """
    ended = run(
        {"do": "add_host", "step": 5, "host": "127.0.0.1:1"}, waits_for=3, slow_s=6, epochs=12
    )
    assert ended.code == 0, ended.text
    assert ended.sizes == [2, 3]
    print(f"the ranks paused for {ended.pause_s[0]:.2f} s")
    assert ended.pause_s[0] < 6


def test_a_host_that_leaves_and_comes_again(run: Run, undisturbed: Ended) -> None:
    """When a host leaves the list its workers exit and the others continue;
    when it returns it gets workers again.
    """
    faults = [
        {"do": "drop_host", "step": 5, "host": "127.0.0.1"},
        {"do": "add_host", "step": 25, "host": "127.0.0.1:1"},
    ]
    ended = run(*faults, hosts="localhost:1,127.0.0.1:1")
    check(ended, undisturbed)
    assert ended.sizes == [2, 1, 2]


def test_an_error_of_the_users_ends_the_job_with_its_code(run: Run) -> None:
    """An exception in the user's code ends the job and is reported once, with its rank."""
    ended = run({"do": "raise", "rank": 1, "step": 10})
    assert ended.code == 1
    assert "FaultInjection raises this on rank 1 after step 10" in ended.text
    assert "Error on rank 1" in ended.text and ended.text.count("Error on rank") == 1, (
        "reported once, of the right rank"
    )
    assert not ended.ends


def test_a_frozen_worker_is_replaced(run: Run, undisturbed: Ended) -> None:
    """The launcher kills a worker that is stopped, and replaces it."""
    ended = run({"do": "stop", "rank": 1, "step": 10}, stall_s=6)
    check(ended, undisturbed)
    assert ended.sizes[:2] == [2, 1] and len(survivors(ended)) == 1


def test_a_stalled_worker_is_replaced(run: Run, undisturbed: Ended, tmp_path: Path) -> None:
    """A worker that lives without progress is killed, and its stack is written first."""
    ended = run({"do": "hang", "rank": 1, "step": 10}, stall_s=6)
    check(ended, undisturbed)
    assert ended.sizes[:2] == [2, 1] and len(survivors(ended)) == 1
    assert "the sums of gradients: model." in ended.text, "the error names the tensors that wait"
    stacks = {
        path.name: path.read_text() for path in (tmp_path / "run" / "logs").glob("stacks-*.txt")
    }
    assert len(stacks) == 2
    assert any(
        name.startswith("stacks-rank1-") and "faults/callback.py" in text
        for name, text in stacks.items()
    )


def test_a_rank_that_is_asked_to_end_leaves(run: Run, undisturbed: Ended) -> None:
    """A rank that gets SIGTERM leaves after a commit, and no step is lost."""
    ended = run({"do": "terminate", "rank": 0, "step": 10}, waits_for=1)
    check(ended, undisturbed)
    assert ended.sizes[:2] == [2, 1] and len(survivors(ended)) == 1


def test_torchrun_resumes_from_the_checkpoint_with_the_nodes_that_are_left(
    tmp_path: Path, undisturbed: Ended
) -> None:
    """If one of two torchrun agents is killed,
    the other restarts with one rank and keeps the batch and rate of two.
    """
    run_dir = tmp_path / "run"
    settings = json.dumps(
        {
            "faults": [],
            "commit": 3,
            "every": 4,
            "epochs": EPOCHS,
            "stall_s": 120,
            "waits_for": 1,
            "slow_s": 0,
        }
    )
    port = free_port()
    place = (
        f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id job --rdzv-conf"
        " last_call_timeout=8"
    )
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "3",
    ]
    line += [*place.split(), str(JOB), str(run_dir), settings]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"agent{i}.log" for i in range(2)]
    agents = []
    try:
        for path in logs:
            with path.open("w") as log:
                agents.append(
                    subprocess.Popen(
                        line, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
            wait_for(lambda: _listens(port), "the first one's store")
        wait_for(
            lambda: any('"step": 14' in p.read_text() for p in run_dir.glob("journal-*.jsonl")),
            "step 14",
        )
        for pid in [agents[1].pid, *_children(agents[1].pid)]:
            os.kill(pid, signal.SIGKILL)
        code = agents[0].wait(120)
    finally:
        for agent in agents:
            for pid in [agent.pid, *_children(agent.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()
    ended = read(code, logs[0].read_text(), run_dir)
    check(ended, undisturbed)
    assert ended.sizes == [2, 1]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], check=False, capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def test_no_process_is_left(run: Run) -> None:
    """After a job with a kill no process is left."""
    ended = run({"do": "kill", "rank": 1, "step": 3}, epochs=1)
    assert ended.code == 0, ended.text
    assert not [pid for pid in ended.lines if os.path.exists(f"/proc/{pid}")]


def _at_step(journals: Path, step: int) -> bool:
    lines = [
        line for path in journals.glob("journal-*.jsonl") for line in path.read_text().splitlines()
    ]
    return any(json.loads(line)["step"] >= step for line in lines if line.endswith("}"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_clock_that_jumps_changes_nothing(
    run: Run, undisturbed: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of day of driver and workers jumps an hour ahead, then two hours back,
    before and after a worker is replaced.
    """
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    subprocess.run(
        ["cc", "-shared", "-fPIC", WORKERS / "clock.c", "-o", library, "-ldl"], check=True
    )
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CLOCK_OFFSET_FILE", str(offset))

    def jump() -> None:
        for step, hours in ((5, 1), (20, -1)):
            wait_for(lambda step=step: _at_step(tmp_path / "run", step), f"step {step}", 120)  # type: ignore[misc]
            offset.write_text(str(3600 * hours))

    jumps = threading.Thread(target=jump)
    jumps.start()
    ended = run({"do": "kill", "rank": 1, "step": 10}, stall_s=20)
    jumps.join()
    check(ended, undisturbed)
    assert ended.sizes == [2, 1, 2] and len(survivors(ended)) == 1
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "last" / "manifest.json").read_text())
    # one of the hour ahead came before it: the newest has the newest time all the same
    ahead = datetime.fromisoformat(manifest["written"]) - datetime.now(timezone.utc)
    assert ahead > timedelta(minutes=50), "the clock did not jump"
