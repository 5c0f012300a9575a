"""`trainkit jobs` of Kubernetes' jobs, with a kubectl that answers as the cluster would."""

from __future__ import annotations

import errno
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.extensions.jobs.command import main
from trainkit.extensions.kubernetes.launcher import KubernetesLauncher
from trainkit.extensions.kubernetes.options import KINDS

KUBECTL = """#!{python}
import json, pathlib, sys
folder = pathlib.Path("{folder}")
words = sys.argv[1:]
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\\n")
answers = json.loads((folder / "answers.json").read_text())
if words[0] == "get":
    given = answers["pods" if words[1] == "pods" else "job"]
    print(json.dumps(given) if given else "")
elif words[0] == "logs":
    print(answers["logs"], end="")
elif "error" in answers:
    sys.exit(answers["error"])
elif words[0] == "delete":
    print("\\n".join(answers.get("left", [])))
"""
CREATED = {"creationTimestamp": "2026-01-31T12:00:00Z"}
UNSCHEDULED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}
RUNNING = {"status": {"phase": "Running"}}
WAITING = {"status": {"phase": "Pending", "conditions": [UNSCHEDULED]}}
PULLING = {
    "status": {
        "phase": "Pending",
        "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}],
    }
}


class Stand:
    """A folder with a job that was created, and what its cluster answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, kind: str = "Job") -> None:
        """Create a job by launcher=kubernetes."""
        given: dict[str, Any] = {
            "image": "trainkit:1",
            "kind": kind,
            "nodes": 2,
            "namespace": "research",
        }
        self.answer()
        KubernetesLauncher(**given, volumes={"runs": "/runs"}).run(
            "mlp", ["fit", "conf=mlp"], "/runs/mlp"
        )

    def answer(self, job: Any = None, pods: Any = (), logs: str = "", **more: Any) -> None:
        """Set what kubectl answers."""
        answers = {"job": job, "pods": {"items": list(pods)}, "logs": logs, **more}
        (self.folder / "answers.json").write_text(json.dumps(answers))

    @property
    def calls(self) -> list[str]:
        """What kubectl was called with."""
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """An empty current folder, and a kubectl on the PATH."""
    for variable in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL.format(python=sys.executable, folder=tmp_path))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return Stand(tmp_path)


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the only job of `jobs --json`."""
    capsys.readouterr()
    assert main("jobs", ["--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    return dict(row)


def ended(condition: str, **more: str) -> dict[str, Any]:
    """Return a job with one condition."""
    return {
        "metadata": CREATED,
        "status": {"conditions": [{"type": condition, "status": "True", **more}]},
    }


@pytest.mark.parametrize(
    ("job", "pods", "state", "reason", "nodes"),
    [
        (None, [], "GONE", "", ""),
        (ended("Complete"), [], "COMPLETED", "", ""),
        (ended("Failed", reason="BackoffLimitExceeded"), [], "FAILED", "BackoffLimitExceeded", ""),
        (
            ended("Suspended", reason="Kueue", message="no quota"),
            [],
            "SUSPENDED",
            "Kueue: no quota",
            "",
        ),
        ({"metadata": CREATED, "status": {"jobStatus": "STOPPED"}}, [], "CANCELLED", "", ""),
        ({"metadata": CREATED}, [], "PENDING", "", "0/0 pods"),
        ({"metadata": CREATED}, [RUNNING, RUNNING], "RUNNING", "", "2/2 pods"),
        ({"metadata": CREATED}, [RUNNING, PULLING], "PENDING", "ImagePullBackOff", "1/2 pods"),
        (
            {"metadata": CREATED},
            [WAITING],
            "PENDING",
            "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            "0/1 pods",
        ),
    ],
)
def test_a_job_has_the_clusters_state(
    job: Any,
    pods: list[Any],
    state: str,
    reason: str,
    nodes: str,
    stand: Stand,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That of its object; while it has not ended that of its pods, with why they wait."""
    stand.create()
    stand.answer(job, pods)
    row = listed(capsys)
    assert (row["cluster"], row["job"], row["state"], row["reason"]) == (
        "kubernetes",
        "mlp",
        state,
        reason,
    )
    assert (row["nodes"], row["manifest"], row["namespace"]) == (
        nodes,
        "kubernetes/mlp.yaml",
        "research",
    )
    assert main("jobs", []) == 0
    assert state in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_asked_for_by_its_group(
    kind: str, stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two operators may have a kind of the same name."""
    stand.create(kind)
    listed(capsys)
    groups = {"Job": "batch", "JobSet": "jobset.x-k8s.io", "TrainJob": "trainer.kubeflow.org"}
    groups |= {"MPIJob": "kubeflow.org", "RayJob": "ray.io"}
    assert (
        f"get {kind.lower()}.{groups[kind]} mlp --ignore-not-found -n research -o json"
        in stand.calls
    )


@pytest.mark.parametrize(
    ("kind", "whose"), [("Job", "-l app.kubernetes.io/name=mlp --prefix"), ("RayJob", "job/mlp")]
)
def test_logs_are_those_of_the_ranks(
    kind: str, whose: str, stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a RayJob those of its driver; a job that waits says why there are none."""
    stand.create(kind)
    stand.answer({"metadata": CREATED}, [RUNNING], "step 7\n")
    capsys.readouterr()
    assert main("jobs", ["logs", "mlp", "lines=20"]) == 0
    assert capsys.readouterr().out == "step 7\n"
    assert stand.calls[-1].startswith(f"logs {whose}") and "--tail=20" in stand.calls[-1]
    stand.answer({"metadata": CREATED}, [WAITING])
    assert main("jobs", ["logs", "kubernetes/mlp.yaml"]) == 2
    assert (
        "Job mlp has no output: it is PENDING (Unschedulable: 0/3 nodes" in capsys.readouterr().err
    )


def test_cancel_deletes_what_was_created(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    """Once: a job that is gone, and has left nothing, has nothing to cancel;
    an error of kubectl's is passed on.
    """
    stand.create()
    stand.answer({"metadata": CREATED}, [RUNNING])
    assert main("jobs", ["cancel", "mlp"]) == 0
    delete = "delete -f kubernetes/mlp.yaml --ignore-not-found --wait=false -o name"
    assert stand.calls[-1] == delete
    text = capsys.readouterr().out
    assert (
        "job mlp is cancelled: the ranks save a checkpoint and end. To resume: kubectl create -f"
        " kubernetes/mlp" in text
    )
    stand.answer({"metadata": CREATED}, [RUNNING], error="Forbidden: no right to delete")
    assert main("jobs", ["cancel", "mlp"]) == 2
    assert (
        "kubectl did not delete job mlp: Forbidden: no right to delete" in capsys.readouterr().err
    )
    stand.answer()
    assert main("jobs", ["cancel", "mlp"]) == 2
    assert "Job mlp is GONE already; there is nothing to cancel." in capsys.readouterr().err


def test_an_mpijob_that_is_cancelled_saves_nothing(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its workers' main process is sshd, which ends at SIGTERM; the message says what it costs."""
    stand.create("MPIJob")
    stand.answer({"metadata": CREATED}, [RUNNING])
    assert main("jobs", ["cancel", "mlp"]) == 0
    assert (
        "job mlp is cancelled: the ranks end at once, and lose the steps since their last"
        " checkpoint. To resume: kubectl create -f" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("job", "state", "left"),
    [
        (ended("Complete"), "COMPLETED", ["job.batch/mlp", "service/mlp"]),
        (ended("Failed"), "FAILED", ["job.batch/mlp"]),
        (None, "GONE", ["service/mlp"]),
    ],
)
def test_cancel_frees_the_name_of_an_ended_job(
    job: Any, state: str, left: list[str], stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it has left would refuse the next job of its name."""
    stand.create()
    stand.answer(job, left=left)
    assert main("jobs", ["cancel", "mlp"]) == 0
    assert (
        f"job mlp is {state} already: what it had left in the cluster is deleted"
        f" ({', '.join(left)}), and its name is free" in capsys.readouterr().out
    )


def test_other_files_are_named(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of the user's in kubernetes/ is no job."""
    stand.create()
    (stand.folder / "kubernetes" / "mine.yaml").write_text("kind: Secret\n")
    assert main("jobs", []) == 2
    assert "kubernetes/mine.yaml is no manifest of a fit" in capsys.readouterr().err


def test_a_manifest_of_another_user_is_listed(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One with secrets may be read by its owner alone; the other jobs of the folder are shown."""
    stand.create()
    secret = stand.folder / "kubernetes" / "secret.yaml"
    secret.touch(0)
    read = Path.read_text

    def read_as_another(file: Path) -> str:
        if file.name == secret.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(file)

    monkeypatch.setattr(Path, "read_text", read_as_another)  # root may read all
    monkeypatch.setattr("os.access", lambda file, _: Path(file).name != secret.name)
    stand.answer({"metadata": CREATED}, [RUNNING])
    capsys.readouterr()
    assert main("jobs", ["--json"]) == 0
    rows = {
        row["job"]: (row["state"], row["reason"]) for row in json.loads(capsys.readouterr().out)
    }
    assert rows == {
        "mlp": ("RUNNING", ""),
        "secret": ("UNKNOWN", "only its owner may read its manifest"),
    }
    assert main("jobs", ["cancel", "secret"]) == 2
    assert "kubernetes/secret.yaml may be read by its owner alone" in capsys.readouterr().err
