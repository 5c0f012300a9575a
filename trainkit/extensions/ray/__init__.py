"""Ray: a fit's ranks on a Ray cluster, functions in actors, searches, data and metrics of Ray's
libraries (docs/ray.md).

options.py      what a user sets, checked; no ray
connection.py   the connection of a process to a cluster, for all that needs one
places.py       which bundle is slot 2 of a host; no ray
cluster.py      connects to a cluster, or starts one here
slots.py        placement groups -> hosts and their slots: the driver's HostSource
keeper.py       the actor of a slot: starts a worker as its child
backend.py      the driver's Backend: keepers
job.py          a command on the cluster, under the elastic driver (extensions/elastic), run here
launcher.py     RayLauncher: options -> job.py; no ray until it runs
executor.py     RayExecutor: functions, in actors (actors.py), or, elastic, in workers of the driver (call.py)
data.py         RayData: a Ray Dataset as training data
report.py       callbacks that report to Ray Train and Tune
tuning/         trials for a Tuner of one's own, and the command `tune`
jobs.py         the jobs of a cluster, for `jobs`
doctor.py       what `doctor` says of Ray
"""

from trainkit.extension import Command, Extension

_LAUNCHER = "trainkit.extensions.ray.launcher.RayLauncher"
_DATA = "trainkit.extensions.ray.data.RayData"
_RAY_REPORT = "trainkit.extensions.ray.report.RayReport"
_TUNE_REPORT = "trainkit.extensions.ray.report.TuneReport"

EXTENSION = Extension(
    name="ray",
    summary=(
        "launcher=ray, RayExecutor, tune, data=ray: ranks, searches and data on a Ray cluster; jobs"
        " lists its jobs"
    ),
    proven="two fits each commit; all of it in the full test run, on one host",
    commands={
        "tune": Command(
            summary=(
                "search for the best settings of a config with Ray Tune"
                " (search.KEY=loguniform(...))"
            ),
            main="trainkit.extensions.ray.tuning.command.main",
            usage="trainkit.extensions.ray.tuning.usage.USAGE",
        )
    },
    targets=(_LAUNCHER, _DATA, _RAY_REPORT, _TUNE_REPORT),
    clusters=("trainkit.extensions.ray.jobs.RayCluster",),
    checks=("trainkit.extensions.ray.doctor.look",),
    names={
        "trainkit.callbacks.RayReport": _RAY_REPORT,
        "trainkit.callbacks.TuneReport": _TUNE_REPORT,
        "trainkit.callbacks.ray_report.RayReport": _RAY_REPORT,
        "trainkit.callbacks.ray_report.TuneReport": _TUNE_REPORT,
        "trainkit.data.RayData": _DATA,
        "trainkit.data.ray_data.RayData": _DATA,
        "trainkit.launch.ray.RayExecutor": "trainkit.extensions.ray.executor.RayExecutor",
        "trainkit.launch.ray.RayLauncher": _LAUNCHER,
        "trainkit.launch.ray.launcher.RayLauncher": _LAUNCHER,
        "trainkit.tuning.trial": "trainkit.extensions.ray.tuning.trainable.trial",
    },
)
