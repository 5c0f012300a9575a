"""python -m trainkit.extensions.script.child CHANGES.json mine.py [arguments]:
a run of the user's script with the changes of a command, on each rank that a launcher started.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.cli.guard import guarded
from trainkit.data.seeding import seed_process
from trainkit.extensions.script.changes import Changes
from trainkit.extensions.script.command_line import Script
from trainkit.extensions.script.running import FirstFit, Train, run_script
from trainkit.launch.environment import read_launcher
from trainkit.run.around_fit import RequestedFit


def main() -> int:
    """Run it; return the exit code."""
    file, path, *arguments = sys.argv[1:]
    changes = Changes.read(Path(file))
    script = Script(path, tuple(arguments))

    def train(requested: RequestedFit, to_the_end: Train) -> None:
        to_the_end(changes.started(requested.start))

    around = FirstFit(script, train, changes.given_to_trainer)
    # the first weights that a script draws are the same in all runs that are compared
    seed_process(int(changes.settings.get("seed", 0)))
    return guarded(lambda: run_script(script, around), read_launcher())


if __name__ == "__main__":
    sys.exit(main())
