"""Manifests of launcher=kubernetes: legal by Kubernetes' own schemas, and what each pod runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from trainkit.errors import ConfigError
from trainkit.extensions.kubernetes.manifest import manifest_of
from trainkit.extensions.kubernetes.options import KINDS, RESTRICTED, name_of, options_of
from trainkit.extensions.kubernetes.schemas import check, known

PLAIN: dict[str, Any] = {
    **dict.fromkeys(
        (
            "gpus_per_node",
            "nproc_per_node",
            "cpu",
            "memory",
            "volumes",
            "env",
            "env_from_secrets",
            "node_selector",
        )
    ),
    **dict.fromkeys(
        (
            "tolerations",
            "service_account",
            "priority_class",
            "image_pull_secrets",
            "pod_spec",
            "namespace",
        )
    ),
    **dict.fromkeys(
        (
            "shm_size",
            "ttl_s",
            "head_resources",
            "security_context",
            "labels",
            "annotations",
            "runtime",
        )
    ),
    "image": "registry.example.com/trainkit:1",
    "kind": "Job",
    "nodes": 1,
    "gpu_resource": "nvidia.com/gpu",
    "max_failures": 3,
    "grace_s": 120,
}
ALL: dict[str, Any] = {
    "nodes": 4,
    "gpus_per_node": 8,
    "cpu": 64,
    "memory": "512Gi",
    "head_resources": {"cpu": 4, "memory": "16Gi"},
    "volumes": {
        "runs": "/runs",
        "data": {
            "mountPath": "/data/",
            "readOnly": True,
            "nfs": {"server": "filer", "path": "/data"},
        },
        "keys": {"mountPath": "/keys", "subPath": "a", "secret": {"secretName": "wandb"}},
    },
    "security_context": "restricted",
    "labels": {"kueue.x-k8s.io/queue-name": "team", "sidecar.istio.io/inject": False},
    "annotations": {"cost-center": 7},
    "env": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": 8},
    "env_from_secrets": ["wandb"],
    "node_selector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "service_account": "trainer",
    "priority_class": "low",
    "image_pull_secrets": ["registry"],
    "pod_spec": {"schedulerName": "volcano"},
    "namespace": "research",
    "shm_size": "16Gi",
    "ttl_s": 3600,
}
# not of a TrainJob
OF_THE_RUNTIME = ("max_failures", "ttl_s", "priority_class", "env_from_secrets", "pod_spec")
WORDS = ["fit", "conf=resnet50", "run_dir='/runs/mine'", "resume=auto"]


def objects(**given: Any) -> list[dict[str, Any]]:
    """Return the documents of a manifest; only of kinds that have a head, it has resources."""
    settings = {**PLAIN, **given}
    if settings["kind"] == "TrainJob":
        settings |= dict.fromkeys(OF_THE_RUNTIME)
    if settings["kind"] not in ("MPIJob", "RayJob"):
        settings["head_resources"] = None
    return [*yaml.safe_load_all(manifest_of("resnet50", WORDS, options_of(settings)))]


@pytest.mark.parametrize("version", ["1.27", "1.33"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, ALL, {**ALL, "nodes": 1}, {"nodes": 2}])
def test_objects_are_legal(given: dict[str, Any], kind: str, version: str) -> None:
    """By the schemas of two releases of Kubernetes:
    no unknown field, none that is missing, no wrong type.
    """
    schemas: Any = pytest.importorskip("kubernetes_validate")
    parts = [*known(objects(**{**given, "kind": kind}))]
    for one in parts:
        schemas.validate(one, version, strict=True)
    parts[-1]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(schemas.ValidationError):
        schemas.validate(parts[-1], version, strict=True)


def container(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the container of a Job's pods."""
    (only,) = found[-1]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_pods_run_the_fit() -> None:
    """torchrun where there are several ranks;
    pods meet at pod 0 by the name that the Service gives it.
    """
    assert container(objects())["command"] == ["python", "-m", "trainkit", *WORDS]
    alone = objects(gpus_per_node=2)
    assert [one["kind"] for one in alone] == ["Job"]
    assert container(alone)["command"][:3] == ["torchrun", "--standalone", "--nproc-per-node=2"]
    service, job = objects(nodes=3, nproc_per_node=2, max_failures=5)
    command = container([job])["command"]
    assert command[:3] == ["torchrun", "--nnodes=3", "--nproc-per-node=2"]
    assert "--rdzv-endpoint=resnet50-0.resnet50:29400" in command
    pod, spec = job["spec"]["template"], job["spec"]
    assert service["metadata"]["name"] == pod["spec"]["subdomain"] == "resnet50"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore" and spec["backoffLimit"] == 15


def test_settings_reach_the_pods() -> None:
    """Resources, volumes, variables, secrets and where pods may run."""
    _, job = objects(**ALL)
    own, pod = container([job]), job["spec"]["template"]["spec"]
    assert own["resources"]["limits"] == {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert own["env"][:2] == [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "OMP_NUM_THREADS", "value": "8"},
    ]
    assert own["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert {mount["name"]: mount["mountPath"] for mount in own["volumeMounts"]} == {
        "runs": "/runs",
        "data": "/data",
        "keys": "/keys",
        "shm": "/dev/shm",
    }
    assert pod["volumes"][0] == {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
    assert pod["volumes"][1] == {"name": "data", "nfs": {"server": "filer", "path": "/data"}}
    assert [m["readOnly"] for m in own["volumeMounts"] if "readOnly" in m] == [True]
    assert [m["subPath"] for m in own["volumeMounts"] if "subPath" in m] == ["a"]
    assert own["securityContext"] == RESTRICTED
    assert pod["volumes"][-1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert (pod["nodeSelector"], pod["schedulerName"]) == ({"pool": "gpu"}, "volcano")
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("trainer", "low")
    assert (
        pod["terminationGracePeriodSeconds"] == 120
        and job["spec"]["ttlSecondsAfterFinished"] == 3600
    )
    assert job["metadata"]["namespace"] == "research"


def test_operators_start_their_own_launchers() -> None:
    """horovodrun on the MPI operator's hostfile;
    launcher=ray in KubeRay's job, a rank for each GPU.
    """
    (mpi,) = objects(**{**ALL, "kind": "MPIJob"})
    assert mpi["spec"]["slotsPerWorker"] == 8
    launcher = mpi["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"][:5] == ["horovodrun", "-np", "32", "--hostfile", "/etc/mpi/hostfile"]
    assert launcher["resources"]["limits"] == {"cpu": "4", "memory": "16Gi"}
    (ray,) = objects(**{**ALL, "kind": "RayJob"})
    assert "launcher=ray launcher.num_workers=32" in ray["spec"]["entrypoint"]
    assert "'launcher.resources_per_worker={CPU: 8, GPU: 1}'" in ray["spec"]["entrypoint"]
    (many,) = objects(**{**ALL, "kind": "JobSet"})
    assert many["spec"]["failurePolicy"] == {"maxRestarts": 3}
    job = many["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (
        "--rdzv-endpoint=resnet50-ranks-0-0.resnet50:29400" in container([{"spec": job}])["command"]
    )


def variables(**given: Any) -> list[dict[str, str]]:
    """Return the variables of each kind of pod in a manifest."""
    pods = []
    for one in known(objects(**given)):
        spec = one["spec"].get("template", one)["spec"]
        pods += [
            {entry["name"]: entry["value"] for entry in own.get("env", ())}
            for own in spec.get("containers", ())
        ]
    return pods


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"gpus_per_node": 2}, "115"),
        ({"nodes": 2, "kind": "JobSet"}, "115"),
        ({"kind": "TrainJob"}, "115"),
        ({"nodes": 2, "grace_s": 3}, "1"),
        ({"nodes": 2, "env": {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": 60}}, "60"),
        ({}, None),
    ],
)
def test_torchrun_gives_ranks_the_grace_of_their_pod(
    given: dict[str, Any], seconds: str | None
) -> None:
    """Almost all of it, and not its own 30 s; the user's own value holds."""
    assert variables(**given)[-1].get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") == seconds


def test_horovodruns_ranks_know_their_launcher_and_rays_driver_starts_ranks() -> None:
    """horovodrun passes its variables on; in a RayJob launcher=ray is the launcher."""
    assert variables(kind="MPIJob")[0]["TRAINKIT_LAUNCHER"] == "kubernetes"
    assert not any("TRAINKIT_LAUNCHER" in each for each in variables(kind="RayJob"))


@pytest.mark.parametrize(
    ("env", "seconds"), [({}, ["120"]), ({"RAY_JOB_STOP_WAIT_TIME_S": 300}, ["300"])]
)
def test_the_head_of_a_rayjob_waits_for_the_last_checkpoint(
    env: dict[str, Any], seconds: list[str]
) -> None:
    """As long as a pod's grace, and not Ray's 3 s; the user's own value holds."""
    (ray,) = objects(**{**ALL, "kind": "RayJob", "env": env, "grace_s": 120})
    head = ray["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert [
        one["value"] for one in head["env"] if one["name"] == "RAY_JOB_STOP_WAIT_TIME_S"
    ] == seconds


def metadata_of(value: Any) -> list[dict[str, Any]]:
    """Return the metadata of all objects and templates in a manifest."""
    if isinstance(value, list):
        return [found for one in value for found in metadata_of(one)]
    if not isinstance(value, dict):
        return []
    own = [value["metadata"]] if "spec" in value and "metadata" in value else []
    return own + metadata_of(list(value.values()))


@pytest.mark.parametrize(
    ("kind", "count"), [("Job", 3), ("JobSet", 2), ("TrainJob", 2), ("MPIJob", 3), ("RayJob", 3)]
)
def test_labels_are_on_all_objects_and_pods(kind: str, count: int) -> None:
    """A queue reads those of the job, an injector those of pods; ours stays beside them."""
    there = metadata_of(objects(**{**ALL, "kind": kind}))
    labels = {
        "app.kubernetes.io/name": "resnet50",
        "kueue.x-k8s.io/queue-name": "team",
        "sidecar.istio.io/inject": "false",
    }
    assert len(there) == count
    assert all(
        one["labels"] == labels and one["annotations"] == {"cost-center": "7"} for one in there
    )


def test_a_trainjob_describes_the_fit_to_its_runtime() -> None:
    """A TrainJob says what its trainer runs, and patches of the pods what a TrainJob may."""
    (job,) = objects(**{**ALL, "kind": "TrainJob", "runtime": "torch-h100"})
    spec = job["spec"]
    assert (job["apiVersion"], spec["runtimeRef"]) == (
        "trainer.kubeflow.org/v1alpha1",
        {"name": "torch-h100"},
    )
    assert spec["trainer"]["command"] == ["torchrun", "-m", "trainkit", *WORDS]
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (4, 8)
    assert spec["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"
    assert spec["trainer"]["env"][0] == {"name": "NCCL_DEBUG", "value": "INFO"}
    patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][
        0
    ]
    pod = patch["template"]["spec"]["template"]["spec"]
    (node,) = pod["containers"]
    assert (patch["name"], node["name"], node["securityContext"]) == ("node", "node", RESTRICTED)
    assert [mount["mountPath"] for mount in node["volumeMounts"]] == [
        "/runs",
        "/data",
        "/keys",
        "/dev/shm",
    ]
    assert (pod["serviceAccountName"], pod["terminationGracePeriodSeconds"]) == ("trainer", 120)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_failures": 3},
            "launcher.max_failures is 3, and a TrainJob cannot say how often pods start again",
        ),
        (
            {"ttl_s": 60},
            "launcher.ttl_s is 60, and a TrainJob cannot say when an ended job is removed",
        ),
        (
            {"priority_class": "low"},
            "launcher.priority_class is 'low', and a TrainJob cannot say the pods' priority",
        ),
        ({"env_from_secrets": ["wandb"]}, "a TrainJob takes no variables from whole Secrets"),
        (
            {"pod_spec": {"schedulerName": "volcano"}},
            "launcher.pod_spec has schedulerName, and a TrainJob may set of its",
        ),
        (
            {"kind": "JobSet", "runtime": "mine"},
            "launcher.runtime is 'mine', and launcher.kind=JobSet has none",
        ),
    ],
)
def test_what_only_a_runtime_says_is_refused(given: dict[str, Any], message: str) -> None:
    """A setting that a TrainJob has no place for, and a runtime for a kind that has none."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        options_of({**PLAIN, "max_failures": None, "kind": "TrainJob", **given})


def test_a_rayjob_grows() -> None:
    """A range of nodes is one of KubeRay's autoscaler and of launcher=ray."""
    (ray,) = objects(kind="RayJob", nodes=[2, 8], gpus_per_node=4)
    cluster = ray["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 2, 8)
    assert cluster["enableInTreeAutoscaling"] is True
    assert "'launcher.num_workers=[8,32]'" in ray["spec"]["entrypoint"]


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ({"cpu": "8000m"}, "{CPU: 8}"),
        ({"cpu": "500m"}, "{CPU: 0.5}"),
        ({"cpu": 8, "nproc_per_node": 3}, "{CPU: 2.6666}"),
        ({"cpu": 1000, "nproc_per_node": 3}, "{CPU: 333.3333}"),
        ({"gpus_per_node": 8, "nproc_per_node": 3}, "{GPU: 2}"),
    ],
)
def test_ranks_of_a_rayjob_share_what_a_pod_has(given: dict[str, Any], shares: str) -> None:
    """However its CPUs are written; together never more than there are, or the last one waits."""
    (ray,) = objects(kind="RayJob", **given)
    assert f"launcher.resources_per_worker={shares}" in shlex.split(ray["spec"]["entrypoint"])


def test_a_shell_reads_the_words_of_a_rayjob_as_they_were_typed() -> None:
    """Its entrypoint is one line of shell; all others have lists."""
    words = ["fit", "", "a=b\tc", "d=e\nf", "g='h'", "i=$(j)", "k=!l", "m=~n", "o=\\p"]
    text = manifest_of("a", words, options_of({**PLAIN, "kind": "RayJob"}))
    entrypoint = yaml.safe_load(text)["spec"]["entrypoint"]
    command = ["sh", "-c", f"printf '%s\\0' {entrypoint}"]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    assert read[3 : 3 + len(words)] == words


def test_values_are_written_as_yaml_has_them() -> None:
    """true, and not Python's True; the same in variables, labels and what selects nodes."""
    given = {"ON": True, "COUNT": 8, "EMPTY": ""}
    (job,) = objects(env=given, labels={"on": True}, node_selector={"on": True})
    template = job["spec"]["template"]
    own = {entry["name"]: entry["value"] for entry in container([job])["env"]}
    assert own.items() >= {"ON": "true", "COUNT": "8", "EMPTY": ""}.items()
    assert template["metadata"]["labels"]["on"] == "true"
    assert template["spec"]["nodeSelector"] == {"on": "true"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "TrainJob"])
def test_a_misspelt_field_is_noticed_before_a_cluster_sees_it(kind: str) -> None:
    """By the schema of a pod, inside the operators' kinds too."""
    pytest.importorskip("kubernetes_validate")
    assert check(objects(kind=kind)) is None
    with pytest.raises(ConfigError, match=r"does not know this manifest, at .*schedulerNam"):
        check(objects(kind=kind, pod_spec={"schedulerNam": "volcano"}))


def test_words_are_not_taken_for_variables() -> None:
    """Kubernetes would put a variable's value in place of $(NAME)."""
    text = manifest_of("a", ["fit", "vars.path=$(HOME)/x"], options_of(PLAIN))
    assert container([*yaml.safe_load_all(text)])["command"][-1] == "vars.path=$$(HOME)/x"


@pytest.mark.parametrize(
    ("text", "name"),
    [("resnet50", "resnet50"), ("gpt_124m", "gpt-124m"), ("My.Conf", "my-conf"), ("3d", "fit-3d")],
)
def test_configs_name_their_jobs(text: str, name: str) -> None:
    """By Kubernetes' rules for names."""
    assert name_of(text, is_given=False) == name
