"""KubernetesLauncher: settings that are refused, and what it does with kubectl."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.kubernetes import creation
from trainkit.extensions.kubernetes.kubectl import run_kubectl
from trainkit.extensions.kubernetes.launcher import KubernetesLauncher

IMAGE: dict[str, Any] = {"image": "registry.example.com/trainkit:1"}
WORDS = ["fit", "conf=mlp", "resume=auto"]

KUBECTL = """#!/bin/sh
echo "$@" >> {folder}/calls
cat > {folder}/text
case "$*" in
  *dry-run*) {check} ;;
  create*) echo job.batch/mlp; {create} ;;
  delete*) {delete} ;;
  get*) echo 12-34 ;;
  patch*) {patch} ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts a kubectl with set answers on the PATH; the current folder is empty."""
    monkeypatch.chdir(tmp_path)

    def make(**answers: str) -> Path:
        program = tmp_path / "bin" / "kubectl"
        program.parent.mkdir()
        answers = dict.fromkeys(("check", "create", "delete", "patch"), "true") | answers
        program.write_text(KUBECTL.format(folder=tmp_path, **answers))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return tmp_path / "calls"

    return make


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": None}, "launcher.image is null; it must be an image that holds trainkit"),
        (
            {"kind": "Pod"},
            "launcher.kind is 'Pod'; it must be one of Job, JobSet, TrainJob, MPIJob, RayJob.",
        ),
        ({"nodes": 0}, "launcher.nodes is 0; it must be a whole number, 1 or more"),
        ({"gpus_per_node": 2, "nproc_per_node": 4}, "each rank takes a GPU"),
        (
            {"memory": "64 GB"},
            "launcher.memory is '64 GB'; it must be a quantity as Kubernetes takes it: 8, 64Gi.",
        ),
        (
            {"memory": "64"},
            "launcher.memory is '64', which Kubernetes reads as 64 bytes. Write the unit after the",
        ),
        ({"memory": "64m"}, "launcher.memory is '64m', which Kubernetes reads as 0.064 bytes."),
        ({"shm_size": "16k"}, "launcher.shm_size is '16k', which Kubernetes reads as 16000 bytes."),
        (
            {"head_resources": {"memory": 16}, "kind": "RayJob"},
            "launcher.head_resources.memory is '16', which Kubernetes reads as 16 bytes.",
        ),
        (
            {"env": {"NCCL_IB_HCA": None}},
            "launcher.env.NCCL_IB_HCA is null; it must be a text. Leave it out, or give ''.",
        ),
        ({"env": {"X": {"a": 1}}}, "launcher.env.X is {'a': 1}; it must be a text."),
        ({"node_selector": {"pool": ["a"]}}, "launcher.node_selector.pool is ['a']; it must be a"),
        (
            {"volumes": {"runs": "runs"}},
            "launcher.volumes.runs is 'runs'; it must be an absolute path in the pods",
        ),
        (
            {"volumes": "runs"},
            "launcher.volumes is 'runs'; it must be a mapping, as {claim: /path}.",
        ),
        (
            {"volumes": {"a": {"nfs": {}}}},
            "launcher.volumes.a.mountPath is null; it must be an absolute path",
        ),
        (
            {"volumes": {"a": {"mountPath": "/a", "nfs": {}, "csi": {}}}},
            "launcher.volumes.a has nfs and csi; a volume is of one",
        ),
        ({"volumes": {"a": 3}}, "launcher.volumes.a is 3; it must be an absolute path"),
        (
            {"nodes": [2, 8]},
            "launcher.nodes is [2, 8], a range, which launcher.kind=RayJob alone can use",
        ),
        (
            {"nodes": [8, 2], "kind": "RayJob"},
            "launcher.nodes is [8, 2]; it must be a whole number",
        ),
        ({"nodes": []}, "launcher.nodes is []; it must be a whole number"),
        ({"head_resources": {"cpu": 1}}, "launcher.kind=Job has no pod that trains nothing"),
        (
            {"head_resources": {"memory": "4 GB"}, "kind": "RayJob"},
            "launcher.head_resources.memory is '4 GB'; it must be",
        ),
        (
            {"security_context": "strict"},
            "launcher.security_context is 'strict'; it must be restricted, or a mapping",
        ),
        ({"labels": {"team": ["a"]}}, "launcher.labels.team is ['a']; it must be a text."),
        (
            {"labels": {"app.kubernetes.io/name": "mine"}},
            "launcher.labels has 'app.kubernetes.io/name', by which the pods of a job know each",
        ),
        ({"env_from_secrets": "wandb"}, "launcher.env_from_secrets is 'wandb'; it must be a list"),
        (
            {"namespace": "My Space"},
            "launcher.namespace is 'My Space'; it must be a name as Kubernetes takes it",
        ),
        ({"tolerations": "gpu"}, "launcher.tolerations is 'gpu'; it must be a list"),
        (
            {"pod_spec": {"containers": []}},
            "launcher.pod_spec has 'containers', which launcher=kubernetes sets.",
        ),
        (
            {"pod_spec": {"terminationGracePeriodSeconds": 600}},
            "launcher.pod_spec has 'terminationGracePeriodSeconds', which is a setting of its own:",
        ),
        (
            {"pod_spec": {"nodeSelector": {}}, "node_selector": {"a": "b"}},
            (
                "launcher.pod_spec has 'nodeSelector', which is a setting of its own:"
                " launcher.node_selector"
            ),
        ),
    ],
)
def test_settings_are_checked(given: dict[str, Any], message: str) -> None:
    """Each with its value, and what is legal."""
    with pytest.raises(ConfigError) as error:
        KubernetesLauncher(**{**IMAGE, **given})
    assert message in str(error.value)


def test_a_job_is_checked_then_created(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cluster sees the whole manifest first; a copy of it is kept."""
    calls = cluster()
    launcher = KubernetesLauncher(**IMAGE, nodes=2, volumes={"runs": "/runs"}, namespace="research")
    file = launcher.run("mlp", WORDS, "/runs/mine")
    assert calls.read_text().splitlines() == ["create --dry-run=server -f -", "create -o name -f -"]
    assert (
        file == Path("kubernetes/mlp.yaml") and file.read_text() == (tmp_path / "text").read_text()
    )
    out = capsys.readouterr().out
    assert "Job mlp is created: 2 x 1 ranks" in out and "python -m trainkit jobs logs mlp" in out


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ('no matches for kind "JobSet"', "The cluster lacks the operator of this kind"),
        (
            'jobs.batch "mlp" already exists',
            (
                "A job of this name is there, or what one has left: give another one"
                " (launcher.job_name=...), or delete it, where it was created: python -m trainkit"
                " jobs cancel mlp"
            ),
        ),
        (
            "Unauthorized",
            "kubectl did not create the job, and nothing of it is left: error: Unauthorized",
        ),
    ],
)
def test_a_cluster_that_refuses_is_quoted(
    cluster: Any, error: str, hint: str, tmp_path: Path
) -> None:
    """With what to do; nothing is created, and no manifest is kept."""
    calls = cluster(check=f"echo 'error: {error}' >&2; exit 1")
    with pytest.raises(ConfigError) as raised:
        KubernetesLauncher(**IMAGE).run("mlp", WORDS, None)
    assert hint in str(raised.value) and error in str(raised.value)
    assert len(calls.read_text().splitlines()) == 1 and not (tmp_path / "kubernetes").exists()


def test_what_was_created_of_a_job_that_fails_is_removed(cluster: Any) -> None:
    """The names that kubectl has printed, and no others, in the namespace of the job."""
    calls = cluster(create="echo 'error: quota' >&2; exit 1")
    delete = "delete job.batch/mlp --ignore-not-found"
    with pytest.raises(ConfigError, match="nothing of it is left: error: quota"):
        KubernetesLauncher(**IMAGE).run("mlp", WORDS, None)
    assert calls.read_text().splitlines()[-1] == delete
    with pytest.raises(ConfigError, match="nothing of it is left: error: quota"):
        KubernetesLauncher(**IMAGE, namespace="research").run("mlp", WORDS, None)
    assert calls.read_text().splitlines()[-1] == f"{delete} -n research"


def test_a_job_that_is_removed_takes_its_service_with_it(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """After launcher.ttl_s: Kubernetes removes what the Job owns. Without ttl_s nothing is asked."""
    calls = cluster()
    given = {**IMAGE, "namespace": "research"}
    KubernetesLauncher(**given, nodes=2).run("mlp", WORDS, None)
    KubernetesLauncher(**given, nodes=1, ttl_s=60).run("mlp", WORDS, None)
    assert not any(line.startswith(("get", "patch")) for line in calls.read_text().splitlines())
    KubernetesLauncher(**given, nodes=2, ttl_s=60).run("mlp", WORDS, None)
    get, patch = calls.read_text().splitlines()[-2:]
    assert get == "get job.batch/mlp -o jsonpath={.metadata.uid} -n research"
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "mlp", "uid": "12-34"}
    text = json.dumps({"metadata": {"ownerReferences": [owner]}})
    assert patch == f"patch service/mlp --type=merge -p {text} -n research"
    assert "will stay" not in capsys.readouterr().out


def test_a_service_that_stays_is_named(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The job is created all the same."""
    cluster(patch="echo 'Forbidden: services' >&2; exit 1")
    KubernetesLauncher(**IMAGE, nodes=2, ttl_s=60).run("mlp", WORDS, None)
    out = capsys.readouterr().out
    assert (
        "the Service mlp will stay when launcher.ttl_s has removed the Job (Forbidden: serv" in out
    )
    assert "jobs cancel mlp" in out and "Job mlp is created" in out


def test_what_could_not_be_removed_is_named(cluster: Any) -> None:
    """With the command that removes it."""
    cluster(create="echo 'error: quota' >&2; exit 1", delete="exit 1")
    with pytest.raises(ConfigError) as raised:
        KubernetesLauncher(**IMAGE, namespace="research").run("mlp", WORDS, None)
    assert "nothing of it is left" not in str(raised.value)
    assert "kubectl delete job.batch/mlp --ignore-not-found -n research" in str(raised.value)


def test_there_is_no_job_without_its_manifest(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`jobs` would not know it: the file is written first, and nothing created if it cannot be."""
    calls = cluster()
    (tmp_path / "kubernetes").touch()
    with pytest.raises(ConfigError, match="written to kubernetes/mlp.yaml .File exists., and not"):
        KubernetesLauncher(**IMAGE).run("mlp", WORDS, None)
    (tmp_path / "kubernetes").unlink()

    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", is_full)
    with pytest.raises(ConfigError, match="No space left on device.*Type the command in a folder"):
        KubernetesLauncher(**IMAGE).run("mlp", WORDS, None)
    assert set(calls.read_text().splitlines()) == {"create --dry-run=server -f -"}
    assert not (tmp_path / "kubernetes").exists()


def test_a_job_that_is_created_has_its_manifest_somewhere(cluster: Any, tmp_path: Path) -> None:
    """Where that of an earlier job cannot be replaced, which another user's in a shared folder cannot
    be either: the error says that the job is there.
    """
    cluster()
    (tmp_path / "kubernetes" / "mlp.yaml").mkdir(parents=True)
    with pytest.raises(ConfigError, match="Job mlp is created, but .*Is a directory") as raised:
        KubernetesLauncher(**IMAGE).run("mlp", WORDS, None)
    (draft,) = (one for one in Path("kubernetes").iterdir() if one.is_file())
    assert f"kubectl delete -f {draft}" in str(raised.value)
    assert draft.read_text() == (tmp_path / "text").read_text()


@pytest.mark.parametrize("second", ["true", "echo 'AlreadyExists' >&2; exit 1"])
def test_two_creations_of_a_name_at_once_leave_the_manifest_of_one(
    second: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins and ends while kubectl creates the objects of the first."""
    cluster(create=second)
    depth: list[str] = []

    def answer(arguments: list[str], text: str = "") -> Any:
        if arguments[:2] == ["create", "-o"] and not depth:
            depth.append(text)
            with contextlib.suppress(ConfigError):
                KubernetesLauncher(**IMAGE, nodes=2).run("mlp", WORDS, None)
            return subprocess.CompletedProcess([], 0, "job.batch/mlp", "")
        return run_kubectl(arguments, text)

    monkeypatch.setattr(creation, "run_kubectl", answer)
    file = KubernetesLauncher(**IMAGE).run("mlp", WORDS, None)
    assert file is not None and file.read_text() == depth[0]
    assert [one.name for one in file.parent.iterdir()] == ["mlp.yaml"]


def test_a_job_of_which_nothing_is_known_has_its_manifest(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubectl does not answer: the job may be there, and `jobs` can see it and end it."""
    cluster()

    def answer(arguments: list[str], text: str = "") -> Any:
        if "--dry-run=server" not in arguments:
            raise ConfigError("kubectl did not answer within 120 s.")
        return run_kubectl(arguments, text)

    monkeypatch.setattr(creation, "run_kubectl", answer)
    with pytest.raises(ConfigError, match="120 s. Whether the job was created is not known; `pyth"):
        KubernetesLauncher(**IMAGE).run("mlp", WORDS, None)
    assert [file.name for file in Path("kubernetes").iterdir()] == ["mlp.yaml"]


@pytest.mark.parametrize(
    ("words", "env", "mode"),
    [
        (WORDS, {"NCCL_DEBUG": "INFO"}, 0o644),
        ([*WORDS, "callbacks.wandb.api_key=abc"], None, 0o600),
        (WORDS, {"WANDB_API_KEY": "abc"}, 0o600),
    ],
)
def test_a_manifest_with_secrets_is_its_owners(
    words: list[str], env: dict[str, str] | None, mode: int, cluster: Any, tmp_path: Path
) -> None:
    """Also where an earlier one is everyone's."""
    cluster()
    (tmp_path / "kubernetes").mkdir()
    (tmp_path / "kubernetes" / "mlp.yaml").touch(0o644)
    before = os.umask(0o022)
    try:
        file = KubernetesLauncher(**IMAGE, env=env).run("mlp", words, None)
    finally:
        os.umask(before)
    assert file is not None and stat.S_IMODE(file.stat().st_mode) == mode
    assert [one.name for one in file.parent.iterdir()] == ["mlp.yaml"]


def test_without_kubectl_the_manifest_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the message says so."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match="There is no kubectl on this machine.*dry_run=true prints the manifest"
    ):
        KubernetesLauncher(**IMAGE).run("mlp", WORDS, None)
    KubernetesLauncher(**IMAGE, dry_run=True).run("mlp", WORDS, None)
    assert "kind: Job" in capsys.readouterr().out


def test_a_runs_folder_outlives_its_pods(capsys: pytest.CaptureFixture[str]) -> None:
    """One on no volume is refused."""
    launcher = KubernetesLauncher(**IMAGE, volumes={"runs": "/runs"}, dry_run=True)
    with pytest.raises(
        ConfigError, match="run_dir is '/other/mine', which is on no volume.*on one there: /runs"
    ):
        launcher.run("mlp", WORDS, "/other/mine")
    lost = {
        "a": {"mountPath": "/a", "readOnly": True, "nfs": {}},
        "b": {"mountPath": "/b", "emptyDir": {}},
    }
    for folder in ("/a/mine", "/b/mine"):
        with pytest.raises(ConfigError, match="on no volume that outlives its pods"):
            KubernetesLauncher(**IMAGE, volumes=lost, dry_run=True).run("mlp", WORDS, folder)
    with pytest.raises(ConfigError, match="of a claim: launcher.volumes={runs: /runs}"):
        KubernetesLauncher(**IMAGE, dry_run=True).run("mlp", WORDS, "runs/mine")


def test_a_dry_run_is_compared_with_the_schemas(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt field is refused; where the schemas are not installed,
    one line says that nothing was compared.
    """
    pytest.importorskip("kubernetes_validate")
    launcher = KubernetesLauncher(**IMAGE, pod_spec={"schedulerNam": "volcano"}, dry_run=True)
    with pytest.raises(ConfigError, match="schedulerNam"):
        launcher.run("mlp", WORDS, None)
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
    launcher.run("mlp", WORDS, None)
    assert "schedulerNam" in (printed := capsys.readouterr()).out and "not compared" in printed.err
