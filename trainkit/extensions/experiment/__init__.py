"""experiment: two variants of a training, compared seed by seed (docs/optimizers.md).

command.py     the command: sides, seeds, budget
sides.py       a side: a config, overrides or a script; what must be equal between two
recorder.py    the callback that notes first weights, samples and values of a run
seeds.py       the runs of each seed: what is done, what is run, what a budget leaves out
statistics.py  the paired and the unpaired interval of a difference
report.py      the result as a table, a page and JSON
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="experiment",
    summary=(
        "experiment: two configs, scripts or overrides compared seed by seed, on the same samples in"
        " the same order"
    ),
    proven="each commit",
    commands={
        "experiment": Command(
            summary="compare two variants seed by seed: difference, interval, verdict (a.yaml b.yaml)",
            main="trainkit.extensions.experiment.command.main",
            usage="trainkit.extensions.experiment.usage.USAGE",
        )
    },
    targets=("trainkit.extensions.experiment.recorder.PairRecorder",),
)
