"""The objects of a job are created, all or none, and their manifest stays in a file.

The file is written before, under another name: where that cannot be done there is no job, which
`jobs` would not know.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.extensions.kubernetes.kubectl import error_of, run_kubectl
from trainkit.launch.shared_folder import made_for_now


def create(text: str, file: Path, where: Sequence[str], *, private: bool) -> None:
    """Create the objects of a manifest, which the cluster checks first.

    Args:
        text: the manifest.
        file: that has it afterwards.
        where: the words with which kubectl takes its namespace.
        private: whether it holds secrets, so that only its owner may read the file.

    Raises:
        ConfigError: the file cannot be written, or the cluster does not take the job: there is
            neither. Or it does not answer: then the file is there, for `jobs`. Or the job is there,
            and an earlier file cannot be replaced.
    """
    checked = run_kubectl(["create", "--dry-run=server", "-f", "-"], text)
    if checked.returncode:
        raise ConfigError(_refused(checked, file.stem))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(made_for_now(file.parent))
            draft = _draft(file, text, private)
        except OSError as error:
            raise ConfigError(
                f"The manifest cannot be written to {file} ({error.strerror}), and nothing was"
                " created: `jobs` knows a job by it. Type the command in a folder where"
                f" {file.parent}/ is a folder that you may write, or can be made."
            ) from None
        try:
            done = run_kubectl(["create", "-o", "name", "-f", "-"], text)
        except BaseException as error:
            path, _ = _named(draft, file)
            if isinstance(error, ConfigError):
                raise ConfigError(
                    f"{error} Whether the job was created is not known; `python -m trainkit jobs`"
                    f" says it when the cluster answers. Manifest: {path}"
                ) from None
            raise
        if done.returncode:
            draft.unlink()
            raise ConfigError(_refused(done, file.stem, _delete(done.stdout.split(), where)))
        path, why = _named(draft, file)
        if why:
            raise ConfigError(
                f"Job {file.stem} is created, but `jobs` will not know it: its manifest cannot be"
                f" written to {file} ({why}), and is {path}. To see it: kubectl get -f {path}; to"
                f" end it: kubectl delete -f {path}"
            )


def end_with_job(name: str, where: Sequence[str]) -> None:
    """Let Kubernetes remove a Service with the Job of its name, after launcher.ttl_s; print a line
    if it will not.
    """
    try:
        uid = run_kubectl(["get", f"job.batch/{name}", "-o", "jsonpath={.metadata.uid}", *where])
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid.stdout.strip()}
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        words = ["patch", f"service/{name}", "--type=merge", "-p", patch, *where]
        done = uid if uid.returncode else run_kubectl(words)
        why = error_of(done) if done.returncode else ""
    except ConfigError as error:  # the job is there, and this is not worth an error
        why = str(error).rstrip(".")
    if why:
        print(
            f"[kubernetes] the Service {name} will stay when launcher.ttl_s has removed the Job"
            f" ({why}); to remove it then: python -m trainkit jobs cancel {name}"
        )


def _draft(file: Path, text: str, private: bool) -> Path:
    # of a name of its own: two commands may create a job of one name at once
    draft = file.with_name(f"{file.stem}.{secrets.token_hex(4)}.part")
    try:
        draft.touch(0o600 if private else 0o644, exist_ok=False)
        draft.write_text(text)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _named(draft: Path, file: Path) -> tuple[Path, str]:
    """Give a manifest its name; return where it is then, and why not there, "" if it is."""
    try:
        return draft.replace(file), ""
    except OSError as error:
        return draft, error.strerror or type(error).__name__


def _delete(objects: Sequence[str], where: Sequence[str]) -> list[str]:
    """Delete objects; return the commands for those that are left."""
    commands = [["delete", one, "--ignore-not-found", *where] for one in objects]
    return [shlex.join(["kubectl", *each]) for each in commands if run_kubectl(each).returncode]


def _refused(done: subprocess.CompletedProcess[str], name: str, left: Sequence[str] = ()) -> str:
    """Return why there is no job.

    Args:
        done: what kubectl answered.
        name: of the job.
        left: commands that remove what it had created, and did not delete.
    """
    why = error_of(done)
    hint = ""
    if "no matches for kind" in why:
        hint = (
            " The cluster lacks the operator of this kind: install it, or use launcher.kind=Job,"
            " which needs none."
        )
    elif "AlreadyExists" in why or "already exists" in why:
        hint = (
            " A job of this name is there, or what one has left: give another one"
            " (launcher.job_name=...), or delete it, where it was created: python -m trainkit jobs"
            f" cancel {name}"
        )
    if left:
        return (
            f"kubectl did not create the job: {why}.{hint} Nor did it delete all that it had"
            f" created. Delete it: {'; '.join(left)}"
        )
    return f"kubectl did not create the job, and nothing of it is left: {why}.{hint}"
