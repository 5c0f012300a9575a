"""Ray: launcher=ray, and the jobs of a Ray cluster (docs/ray.md)."""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="ray",
    summary="launcher=ray starts a fit's ranks on a Ray cluster, and replaces those that are lost; jobs lists its jobs",
    proven="two fits each commit; all of it in the full test run, on one host",
    targets=("trainkit.launch.ray.launcher.RayLauncher",),
    clusters=("trainkit.launch.ray.jobs.RayCluster",),
)
