"""Approximate communication on several ranks:
what equals exact sums, what ranks share, what resumes, and what travels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launching import run_command
from tests.parallel.starts import ROOT, Starts, line_of
from trainkit.checkpoint.format import load_training

STARTS = [("ddp", 2), ("horovod", 2), ("ddp", 3), ("horovod", 3)]
CHANGES = [(("ddp", 2), ("ddp", 3)), (("horovod", 3), ("horovod", 2)), (("ddp", 3), ("horovod", 2))]
KINDS = ["powersgd", "local", "postlocal", "diloco", "fragments"]
ALONE = KINDS[1:]

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """Of each start: (launcher, ranks), or two of them:
    the second one resumes the checkpoints of the first.
    """

    def line(start: Any) -> str:
        if isinstance(start[0], tuple):
            source, start = start
            _ = starts[source]
            return line_of(*start, "communication.py") + f" {{out}} {starts.folders[source]}"
        # Horovod fuses what is ready together, and on three ranks the order of its additions
        # follows from that: a sum of one run would differ from the next one's in the last digit.
        return "env HOROVOD_FUSION_THRESHOLD=0 " + line_of(*start, "communication.py") + " {out}"

    starts = Starts(line, tmp_path_factory, timeout_s=300)
    return starts


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_what_equals_exact_sums(start: Any, results: Any) -> None:
    """Factors of full rank, and an outer step after each step, train plain SGD;
    short last steps and own weights included.
    """
    for rank in results[start]["exact_sums"]:
        assert not torch.equal(rank["exact"], rank["weighted, exact"])
        for name, own in rank.items():
            base = rank["weighted, exact" if name.startswith("weighted") else "exact"]
            torch.testing.assert_close(own, base, rtol=0, atol=1e-13)


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_layers_that_a_rank_does_not_use(start: Any, results: Any) -> None:
    """One that no rank has used stays as it is, weight decay included;
    one that some ranks use gets their sum.
    """
    for rank in results[start]["unused"]:
        for name, value in rank["exact"].items():
            torch.testing.assert_close(rank["full rank"][name], value, rtol=0, atol=1e-13)


def equal_steps(ranks: list[Any], kind: str) -> list[bool]:
    """Whether all ranks hold the same weights after each step."""
    steps = zip(*(rank[kind]["steps"] for rank in ranks), strict=True)
    return [all(torch.equal(other, step[0]) for other in step) for step in steps]


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_ranks_meet_when_they_should(start: Any, results: Any) -> None:
    """In each step under PowerSGD; else at outer steps,
    which validations (each 3 steps here) bring forward, and at the end.
    """
    ranks = results[start]["approximate"]
    count = len(ranks[0]["exact"]["steps"])
    assert all(equal_steps(ranks, "exact"))
    assert all(equal_steps(ranks, "powersgd"))
    alone = {"local": 3, "diloco": 4, "fragments": None}
    for kind, every in alone.items():
        # The record of a step is older than the validation after it only if the validation is
        # inside the epoch.
        expected = [bool(every) and step % every == 0 for step in range(1, count + 1)]
        steps = equal_steps(ranks, kind)
        assert all(f for f, e in zip(steps, expected, strict=True) if e), kind
        assert not steps[0], kind
        assert not steps[1], kind
    assert equal_steps(ranks, "postlocal")[:6] == [True, True, True, False, False, True]
    for kind in KINDS:
        for rank in ranks:
            assert torch.equal(rank[kind]["end"], ranks[0][kind]["end"])
            assert all(map(torch.equal, rank[kind]["evaluated"], ranks[0][kind]["evaluated"]))
            assert not torch.equal(rank[kind]["end"], rank["exact"]["end"])


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_exact_steps_come_first(start: Any, results: Any) -> None:
    """Those before `start_after_steps` are exact sums, but for the order of adding on three ranks;
    the next one is not.
    """
    for rank in results[start]["approximate"]:
        for kind, first in (("powersgd", 2), ("postlocal", 3)):
            pairs = zip(rank[kind]["steps"], rank["exact"]["steps"], strict=True)
            same = [torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in pairs]
            assert same[: first + 1] == [True] * first + [False], kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", STARTS, ids=str)
def test_resuming_changes_no_bit_on_any_rank(start: Any, kind: str, results: Any) -> None:
    """Killed inside a round and resumed,
    each rank has the weights of the run that never stopped, step by step.
    """
    for rank in results[start]["resumed"]:
        whole, parts = rank[kind]["whole"], rank[kind]["parts"][-len(rank[kind]["whole"]) :]
        assert len(whole) == 8
        assert [torch.equal(a, b) for a, b in zip(whole, parts, strict=True)] == [True] * 8
        assert torch.equal(*rank[kind]["ends"])


@pytest.mark.parametrize(("source", "start"), CHANGES, ids=str)
def test_another_number_of_ranks_resumes(source: Any, start: Any, results: Any) -> None:
    """What was held back keeps its sum; weights and moments of ranks alone are averaged;
    both are said, as is the contract.
    """
    resumed, old = results[source, start]["changed"], results[source]["resumed"]
    text = results.output[source, start]
    assert f"What {source[1]} ranks held back (PowerSGD) is split evenly over {start[1]}" in text
    assert f"{source[1]} ranks stepped alone" in text
    assert "communication was an outer step of rate 0.7" in text
    assert "the state of another communication" in text
    before = saved(results.folders[source] / "resumed powersgd parts")
    for name in before[0]["error"]:
        total = sum(rank["powersgd"]["start"]["error"][name] for rank in resumed)
        torch.testing.assert_close(
            total, sum(rank["error"][name] for rank in before), rtol=1e-12, atol=1e-15
        )
        assert float(total.abs().max()) > 0
    for kind in ALONE:
        assert len(old) == source[1]
        assert all(
            torch.equal(rank[kind]["weights"], resumed[0][kind]["weights"]) for rank in resumed
        )
        assert all(torch.equal(rank[kind]["end"], resumed[0][kind]["end"]) for rank in resumed)
        parts = saved(results.folders[source] / f"resumed {kind} parts")
        moments = [part["optimizers"][0][0]["exp_avg"] for part in parts]
        mean = resumed[0][kind]["start"]["optimizers"][0][0]["exp_avg"]
        torch.testing.assert_close(mean, torch.stack(moments).mean(0))
        assert not torch.equal(moments[0], moments[1])


def saved(run: Path) -> list[dict[str, Any]]:
    """Each rank's own part of the checkpoint at which a run was killed."""
    return load_training(run / "checkpoints" / "killed")["communication_of_ranks"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_the_guard_compares_what_ranks_share(start: Any, results: Any) -> None:
    """It is content with ranks that step alone,
    and names a rank on which the shared weights have changed.
    """
    for rank in results[start]["guarded"]:
        assert rank["sound"] == ""
        assert "'the shared model.0.weight' of rank 1" in rank["damaged"]
        assert "At step 5" in rank["damaged"]


def own_network() -> str | None:
    """Why a command cannot have a network of its own here, or None."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        return "needs root, unshare and ip"
    done = subprocess.run(
        "unshare -n ip link set lo up", shell=True, capture_output=True, check=False
    )
    return None if done.returncode == 0 else "network namespaces are not allowed here"


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Bytes that cross the interface of a network of its own in a step, by launcher and kind."""
    if reason := own_network():
        pytest.skip(reason)
    by_launcher = {}
    for launcher in ("ddp", "horovod"):
        folder = tmp_path_factory.mktemp(launcher)
        line = line_of(launcher, 2, "traffic.py") + f" {folder / 'out.pt'}"
        done = run_command(
            f"unshare -n sh -c 'ip link set lo up && {line}'",
            folder,
            timeout_s=200,
            PYTHONPATH=str(ROOT),
        )
        assert done.code == 0, done.text
        by_launcher[launcher] = torch.load(folder / "out.pt", weights_only=False)
    return by_launcher


@pytest.mark.parametrize("launcher", ["ddp", "horovod"])
def test_fewer_bytes_travel(launcher: str, traffic: Any) -> None:
    """Counted at the network interface:
    as few as the factors' sizes and the rarer messages promise, on both engines.
    """
    steps = traffic[launcher]
    # Two square layers of 256: 2 x 256 x 256 numbers of 4 bytes, and 512 of the biases. Both ranks
    # send and receive once.
    assert steps["exact"] > 2 * 2 * 256 * 256 * 4
    # Of rank 4: 2 x 2 x 256 x 4 numbers and the biases, 32 times less; the rest is the protocol's.
    assert steps["powersgd"] < steps["exact"] / 15
    assert steps["diloco"] < 1.3 * steps["exact"] / 10  # an outer step each 10 steps
    assert steps["fragments"] < 1.3 * steps["exact"] / 10
    assert steps["diloco"] > 0.7 * steps["exact"] / 10
