"""Elastic: a fit continues when ranks die, leave or join (docs/elastic.md).

launch.py       `python -m trainkit launch`: the driver by its own name, without Horovod
horovodrun.py   what horovodrun asks for; `python -m trainkit.launch.elastic`
driver.py       the driver of a job, with its call tree; no torch
ranks.py        a rank's side: the ranks of its engine, which the driver assigns again (client.py)
replicas.py     which workers get ranks together, and are lost together (engine=fsdp engine.replicas)
copies/         each rank's state in the memory of other hosts (engine=fsdp without replicas)
callback.py     commits of a fit, from which it continues (attempts.py, rehearsal.py)
"""

from trainkit.extension import Command, Extension

_CALLBACK = "trainkit.extensions.elastic.callback.Elastic"

EXTENSION = Extension(
    name="elastic",
    summary=(
        "callbacks=elastic under `launch`, horovodrun --min-np or launcher=ray: ranks that are lost"
        " are replaced, and others join"
    ),
    proven="lost, late and frozen ranks each commit; storms of faults in the full test run",
    commands={
        "launch": Command(
            "start a command on several ranks, replace those that are lost (launch -np 4 --min-np 2"
            " -- python train.py)",
            "trainkit.extensions.elastic.launch.main",
        )
    },
    targets=(_CALLBACK,),
    names={
        "trainkit.callbacks.Elastic": _CALLBACK,
        "trainkit.callbacks.elastic.Elastic": _CALLBACK,
        "trainkit.launch.elastic.main": "trainkit.extensions.elastic.horovodrun.main",
        "trainkit.launch.elastic.run_elastic": (
            "trainkit.extensions.elastic.horovodrun.run_elastic"
        ),
    },
    ranks={"TRAINKIT_WORKER": "trainkit.extensions.elastic.ranks.elastic_ranks"},
)
