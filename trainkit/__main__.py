"""python -m trainkit <command> [overrides]: finds the command; each is a file of cli/."""

from __future__ import annotations

import importlib
import signal
import sys

from trainkit.cli.options import with_plain_run
from trainkit.cli.usage import USAGES
from trainkit.errors import did_you_mean
from trainkit.launch.slurm.step import hold_signals
from trainkit.version import __version__

_COMMANDS = {
    "fit": ("run", "train"),
    "validate": ("run", "evaluate a checkpoint on the validation data"),
    "test": ("run", "evaluate a checkpoint on the test data"),
    "predict": ("run", "write a checkpoint's predictions"),
    "data": (
        "data",
        "list samples that cannot be loaded (data check conf=NAME), or write texts as tokens (data tokens)",
    ),
    "plan": ("plan", "describe what fit would do, at any number of ranks (ranks=64), without training"),
    "tune": ("tune", "search for the best settings of a config with Ray Tune (search.KEY=loguniform(...))"),
    "find": ("find", "find a setting by measuring the job: rate, microbatch, loader workers, the wire (find lr conf=NAME)"),
    "check-resume": ("check_resume", "prove that a killed and resumed run ends like one that was never killed"),
    "export": ("export", "write a checkpoint as safetensors, for torch.export or ONNX (ckpt_path=best), and check it"),
    "serve": ("serve", "answer HTTP requests with a run's model or an export, on Ray Serve or in one process"),
    "generate": ("generate", "continue a text with a run's model (RUN_DIR prompt='...')"),
    "show": ("show", "show curves, rates and checkpoints of a run, or of several, on one page (RUN_DIR ...)"),
    "status": ("status", "tell what a running or ended job does: state, ranks, step, rate, alerts (RUN_DIR --watch)"),
    "runs": ("runs", "print a table of the runs below a folder (DIR sort=val/acc --json)"),
    "jobs": (
        "jobs",
        "list the jobs on Slurm, Kubernetes and Ray, print their output, cancel them (jobs logs JOB, jobs cancel JOB)",
    ),
    "timeline": ("timeline", "report recorded steps as a table and a page (RUN_DIR; callbacks=timeline records)"),
    "replay": ("replay", "replay a step saved by callbacks=capsule, and report its non-finite values"),
    "scaling": ("scaling", "run a config at several numbers of ranks (ranks=1,2), and predict larger ones"),
    "doctor": ("doctor", "report this machine's set-up, its faults and their fixes (--json)"),
    "explain": ("explain", "explain an error that a message names, with an example and what to do (explain NAME)"),
    "completion": ("completion", "print the tab completion for bash"),
    "horovod": ("horovod", "install (build) Horovod for this torch, make its wheel for other machines, or check it"),
    "deepspeed": ("deepspeed", "check DeepSpeed: what of it runs here, and build what it needs"),
}

_OWN_ARGUMENTS = ("horovod", "deepspeed")  # they read no config

_USAGE = """usage: python -m trainkit <command> [conf=NAME] [key=value ...]

{commands}

  python -m trainkit fit conf=resnet50                             one process
  horovodrun -np 2 python -m trainkit fit conf=resnet50            two, on Horovod
  torchrun --nproc-per-node 2 -m trainkit fit conf=resnet50        two, on torch.distributed
  python -m trainkit fit conf=resnet50 launcher=ray                two, on a Ray cluster (docs/ray.md)
  python -m trainkit fit conf=resnet50 launcher=slurm              a batch job on Slurm (docs/slurm.md)
  python -m trainkit fit conf=resnet50 --cfg job                   print the config and stop
  python -m trainkit fit -m conf=resnet50 optimizer.lr=0.05,0.1    one run for each value
"""


def main() -> int:
    """Run the command of the command line and return the exit code."""
    hold_signals()
    arguments = sys.argv[1:]
    usage = _USAGE.format(commands="\n".join(f"  {name:<14}{text}" for name, (_, text) in _COMMANDS.items()))
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage)
        return 0 if arguments else 2
    command = arguments[0]
    if command in ("-V", "--version"):
        print(f"trainkit {__version__}")
        return 0
    if command not in _COMMANDS:
        print(f"'{command}' is no command.{did_you_mean(command, _COMMANDS)}\n\n{usage}", file=sys.stderr)
        return 2
    if "-h" in arguments or "--help" in arguments:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # help into `head` ends in silence
    rest = arguments[1:]
    if command in USAGES and USAGES[command].takes_run:
        rest = with_plain_run(rest)
    module = importlib.import_module(f"trainkit.cli.{_COMMANDS[command][0]}")
    code: int = module.main(rest) if command in _OWN_ARGUMENTS else module.main(command, rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
