"""What `replay` takes."""

from trainkit.cli.as_json import OPTION
from trainkit.cli.usage import TRUST
from trainkit.extension import Usage

USAGE = Usage(
    "CAPSULE [key=value ...]",
    "Replay a step saved by callbacks=capsule (<run_dir>/capsules/step=N-rank=R), and report its"
    " non-finite values. task.X and trainer.X override the run's config.",
    (
        ("update", "bool", "false", "make the optimizer's update too, with this rank's gradient"),
        ("pdb", "bool", "false", "stop in the debugger before training_step"),
        ("weights", "FILE | FOLDER", "the capsule's", "a checkpoint's folder or a file of weights"),
        TRUST,
        OPTION,
    ),
    (
        "runs/mine/capsules/step=20-rank=0",
        "runs/mine/capsules/step=20-rank=0 pdb=true task.dropout=0",
    ),
    takes_run=True,
)
