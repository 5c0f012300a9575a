"""A worker on another host: `ssh host sh -c <script>`, with all of the job's data sent through
stdin.

The script on the command line contains nothing of the job (SCRIPT). Its stdin carries, as shell
text, the environment with the job's secret, the folder and the command, up to a marker line; then
one line per signal (SIGINT becomes SIGTERM, since a shell starts its background processes with
SIGINT ignored). When stdin ends, because the driver or the connection has ended, the worker's group
gets SIGTERM, and after 30 s SIGKILL. Exit code: the worker's, 128 + a signal's number, 255 if ssh
failed. The host needs sh, setsid (util-linux) and sleep.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

SCRIPT = r"""
exec 3<&0 </dev/null
text= go=
while IFS= read -r line <&3; do
    if [ "$line" = "$1" ]; then go=1; break; fi
    text="$text$line
"
done
[ -n "$go" ] || exit 255
eval "$text"
trap : TERM INT HUP
setsid "$@" 3<&- &
worker=$!
{
    while IFS= read -r name <&3; do
        [ "$name" = INT ] && name=TERM
        kill -s "$name" -- "-$worker"
    done
    kill -s TERM -- "-$worker"
    left=30
    while [ $left -gt 0 ] && kill -s 0 -- "-$worker"; do sleep 1; left=$((left - 1)); done
    kill -s KILL -- "-$worker"
} >/dev/null 2>&1 &
watch=$!
exec 3<&- 2>/dev/null
while :; do
    wait $worker
    code=$?
    kill -s 0 $worker || break
done
kill -s KILL -- "-$worker"
kill -s KILL $watch
exit $code
"""

# Variables of this host or login only; Horovod's own launcher leaves out the first four, too.
_OWN = re.compile(
    r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY|PWD|SHLVL|_|IFS|SSH_.*|HOSTNAME"
)
# setting one ends the shell
_READ_ONLY = {"UID", "EUID", "PPID", "GROUPS", "BASHOPTS", "SHELLOPTS", "BASH_VERSINFO"}


def ssh_command(
    host: str, port: int | None, identity_file: str | None, mark: str, host_keys: str
) -> list[str]:
    """Return the command that starts SCRIPT on a host.

    Args:
        host: as ssh takes it.
        port, identity_file: None for ssh's default.
        mark: the line that ends `first_lines`, a plain word.
        host_keys: ssh's StrictHostKeyChecking. "accept-new" takes the key of a host that is seen
            for the first time, and refuses one that has changed.
    """
    options = [
        "BatchMode=yes",
        f"StrictHostKeyChecking={host_keys}",
        "ConnectTimeout=10",
        "ServerAliveInterval=15",
        "ServerAliveCountMax=4",
    ]
    command = ["ssh", *(word for option in options for word in ("-o", option))]
    if port is not None:
        command += ["-p", str(port)]
    if identity_file is not None:
        command += ["-i", identity_file]
    return [*command, host, f"exec sh -c {shlex.quote(SCRIPT)} trainkit {mark}"]


def first_lines(environ: Mapping[str, str], folder: str, command: Sequence[str], mark: str) -> str:
    """Return the text that the script reads before it starts the worker."""
    lines = [
        f"export {name}={shlex.quote(value)}"
        for name, value in environ.items()
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        and not _OWN.fullmatch(name)
        and name not in _READ_ONLY
    ]
    lines.append(f"cd {shlex.quote(folder)} 2>/dev/null")
    lines.append(f"set -- {' '.join(shlex.quote(word) for word in command)}")
    return "\n".join([*lines, mark, ""])
