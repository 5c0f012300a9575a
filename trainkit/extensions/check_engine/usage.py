"""What `check-engine` takes."""

from trainkit.cli.as_json import OPTION
from trainkit.extension import Usage

USAGE = Usage(
    "[ranks=N] [steps=N] conf=NAME engine=NAME [key=value ...] | [engine=NAME] SCRIPT [arguments]",
    "Prove that a model trains on an engine and a number of ranks as it does in one process: outputs"
    " of modules, gradients and weights of the first steps are compared, and the first that differs"
    " is named. Dropout is off. Exit code 1 if something differs, 2 if it could not be compared.",
    (
        ("ranks", "int", "2", "ranks of the run that is checked"),
        ("steps", "int", "3", "steps that are compared"),
        ("float64", "bool", "false", "compute all runs in float64, where rounding hides nothing"),
        ("keep", "bool", "false", "keep the folder of the runs even if nothing differs"),
        OPTION,
    ),
    (
        "conf=gpt engine=fsdp",
        "conf=gpt engine=fsdp engine.tensor=2 ranks=4",
        "conf=resnet18 engine=ddp trainer.sync_batchnorm=true",
        "engine=fsdp engine.tensor=2 ranks=2 mine.py --width 128",
    ),
    takes_config=True,
)
