"""A plain Python script where a command takes conf=NAME: plan, check-resume, check-engine, find,
scaling and experiment (docs/tutorial_script.md).

command_line   the script and its arguments among those of a command
engine_options an engine before the script, in place of its own
entry          from a command's arguments to the fit that it looks at
running        runs a script up to its fit
requested      the fit of a config or of a script, and how it is made or started again
own_options    the options of a command beside those, and where it may run
changes        what a command changes in a run that it starts
child          the process of such a run of a script
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="script",
    summary=(
        "plan, check-resume, check-engine, find, scaling and experiment of a plain script, without a"
        " config"
    ),
    proven="each commit",
)
