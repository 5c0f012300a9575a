"""Programs that other commands start and wait for: builds, and jobs of several ranks. They end with
their command; a failure is a few lines.

commands   runs a program to its end, with its failure summarised
local      starts a job of several ranks on this machine
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="programs",
    summary="programs that other commands start and wait for: builds, and jobs of several ranks",
    proven="each commit",
)
