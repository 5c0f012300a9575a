"""What `check-resume` takes."""

from trainkit.cli.as_json import OPTION
from trainkit.extension import Usage

USAGE = Usage(
    "kill_at=STEP [...] conf=NAME [key=value ...] | SCRIPT [arguments]",
    "Prove that a killed and resumed run ends like one that was never killed: three runs,"
    " compared. Of a script each ends with its first fit. Exit code 1 if something differs.",
    (
        ("kill_at", "int", "", "the step in which a run is killed"),
        ("save_at", "int", "kill_at - 2", "the step after which it saves"),
        ("steps", "int", "kill_at + 8", "the step where the runs end"),
        (
            "ranks",
            "int[,int]",
            "1",
            "number of ranks; of two numbers, the resumed run gets the second",
        ),
        ("resume_engine", "NAME", "that of all runs", "engine of the resumed run"),
        ("keep", "bool", "false", "keep the folder of the three runs even if nothing differs"),
        OPTION,
    ),
    (
        "conf=mlp kill_at=17",
        "conf=mlp kill_at=17 ranks=2,1 save_at=15",
        "kill_at=17 ranks=2 mine.py --width 128",
        "conf=mlp kill_at=9 ranks=2 engine=fsdp resume_engine=ddp",
    ),
    takes_config=True,
)
