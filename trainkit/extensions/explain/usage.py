"""What `explain` takes."""

from trainkit.cli.as_json import OPTION
from trainkit.extension import Usage

USAGE = Usage(
    "[NAME] [--json]",
    "Explain an error that a message names, with an example and what to do. Without a name:"
    " list all of them.",
    (OPTION,),
    examples=("", "no-checkpoint"),
)
