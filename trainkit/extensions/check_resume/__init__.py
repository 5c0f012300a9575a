"""check-resume: whether a run that is killed and resumes equals the one that never stopped
(docs/checkpoints.md).

command.py    three runs: the whole one, one that is killed, one that resumes
recorder.py   the callback that notes what each run does
report.py     compares the notes and the weights
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="check_resume",
    summary=(
        "check-resume: proves that a killed and resumed run of a config ends like one that was"
        " never killed"
    ),
    proven="each commit; engines and numbers of ranks in the full test run",
    commands={
        "check-resume": Command(
            summary="prove that a killed and resumed run ends like one that was never killed",
            main="trainkit.extensions.check_resume.command.main",
            usage="trainkit.extensions.check_resume.usage.USAGE",
        )
    },
    targets=("trainkit.extensions.check_resume.recorder.ResumeRecorder",),
)
