"""check-engine: whether a model trains on an engine and a number of ranks as it does in one process
(docs/large_models.md).

command.py          the runs: one process, one that is disturbed by rounding, the ranks
problem.py          the settings with which one process takes the ranks' steps
recorder.py         the callback that records what each run computes
watch.py            the outputs of a microbatch's modules
disturbance.py      a rounding error in weights and inputs
without_dropout.py  dropout switched off in all runs
sketch.py           tensors as small linear sketches
recording.py        the records, paired by module and weight
compare.py          the comparison, stage by stage
causes.py           likely causes of a difference
report.py           the table and the verdict
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="check_engine",
    summary=(
        "check-engine: a model's outputs, gradients and weights on an engine beside those of one"
        " process"
    ),
    proven="each commit; recipes and engines in the full test run; on a GPU not yet",
    commands={
        "check-engine": Command(
            summary="prove that a model trains on an engine and ranks as it does in one process",
            main="trainkit.extensions.check_engine.command.main",
            usage="trainkit.extensions.check_engine.usage.USAGE",
        )
    },
    targets=("trainkit.extensions.check_engine.recorder.EngineRecorder",),
)
