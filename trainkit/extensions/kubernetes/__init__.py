"""launcher=kubernetes: a fit as a Job, JobSet, TrainJob, MPIJob or RayJob (docs/kubernetes.md)."""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="kubernetes",
    summary=(
        "launcher=kubernetes creates a Job, JobSet, TrainJob, MPIJob or RayJob; jobs lists them"
    ),
    proven="each commit against the schemas of Kubernetes; not on a cluster yet",
    targets=("trainkit.extensions.kubernetes.launcher.KubernetesLauncher",),
    names={
        "trainkit.launch.kubernetes.launcher.KubernetesLauncher": (
            "trainkit.extensions.kubernetes.launcher.KubernetesLauncher"
        )
    },
    clusters=("trainkit.extensions.kubernetes.cluster.KubernetesCluster",),
)
