"""launcher=slurm at the command line: the script, and what is refused in words;
no Slurm is needed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.config.compose import run as compose
from trainkit.config.launchers import starts_ranks
from trainkit.errors import ConfigError
from trainkit.launch.moments import Moment
from trainkit.run.progress_file import FILE, FitStart, Progress, write_progress


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str, command: str = "fit") -> int:
    """Run a command with launcher=slurm."""
    return main(command, ["conf=mlp", "launcher=slurm", *words])


def script(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the script, which bash can parse."""
    assert run("launcher.dry_run=true", "run_dir=my run", *words) == 0
    text = capsys.readouterr().out
    assert (
        subprocess.run(
            ["bash", "-n"], input=text, text=True, capture_output=True, check=True
        ).stderr
        == ""
    )
    return text


def started(
    text: str, folder: Path, srun: str = "", restarts: int = 0
) -> tuple[int, list[str], str]:
    """Run a job's script as its first start, or a later one, with a line of shell in place of srun.

    Returns:
        Its exit code, what srun was given, and what it has printed; scontrol writes "requeued".
    """
    stubs = {"srun": f'printf "%s\\n" "$@" > given\n{srun}', "scontrol": 'echo "$@" >> requeued'}
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "my run" / "slurm").mkdir(parents=True, exist_ok=True)
    for name, body in stubs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder}/bin:/usr/bin:/bin"
    env = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    return (
        done.returncode,
        (folder / "given").read_text().splitlines(),
        done.stdout + done.stderr,
    )


def test_a_dry_run_prints_the_script_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Slurm's names, the signal, requeue and resume; the launcher's own words are not passed on."""
    text = script(
        capsys,
        "launcher.nodes=4",
        "launcher.gpus_per_node=8",
        "launcher.time=04:00:00",
        "optimizer.lr=0.1",
    )
    lines = text.splitlines()
    assert list(tmp_path.iterdir()) == []
    for directive in (
        "nodes=4",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "time=04:00:00",
        "signal=USR1@60",
        "requeue",
    ):
        assert f"#SBATCH --{directive}" in lines
    assert "#SBATCH --job-name=mlp" in lines and "#SBATCH --open-mode=append" in lines
    (srun,) = [line for line in lines if line.startswith("srun ")]
    assert srun.endswith(
        f"-m trainkit fit conf=mlp optimizer.lr=0.1 \"run_dir='{tmp_path}/my run'\" resume=auto || code=$?"
    )
    assert (
        "launcher" not in srun
        and 'scontrol requeue "$SLURM_JOB_ID"' in text
        and "RENDEZVOUS" not in text
    )


def test_settings_reach_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    """Options beyond the named ones, lines before srun, words for it,
    and a start from another run's checkpoint.
    """
    words = (
        "launcher.extra={licenses: matlab, exclusive: true, gpu-bind: none}",
        "launcher.setup=[module load cuda]",
    )
    more = (
        'launcher.srun_args=["--mpi=none"]',
        "launcher.cpus_per_task=3",
        'launcher.constraint="a100&ib"',
        "engine=horovod",
    )
    text = script(
        capsys,
        *words,
        *more,
        "launcher.requeue=false",
        "ckpt_path=/other/last",
        "launcher.python=python3",
    )
    lines = text.splitlines()
    for line in (
        "--licenses=matlab",
        "--exclusive",
        "--gpu-bind=none",
        "--constraint='a100&ib'",
        "--no-requeue",
    ):
        assert f"#SBATCH {line}" in lines
    assert "module load cuda" in lines and "scontrol requeue" not in text
    assert (
        "srun --kill-on-bad-exit=1 --cpus-per-task=3 --mpi=none python3 -m trainkit fit conf=mlp"
        in text
    )
    assert "start=(\"ckpt_path='/other/last'\")" in lines
    again = "start=(\"ckpt_path='/other/last'\" resume=auto)"
    assert f'[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && {again}' in lines
    assert 'export HOROVOD_RENDEZVOUS_SECRET="$(od' in text  # a new one at each start, in no file


def test_a_cluster_has_a_file_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A user's conf/launcher/NAME.yaml over the shipped one."""
    (tmp_path / "conf" / "launcher").mkdir(parents=True)
    (tmp_path / "conf" / "launcher" / "mine.yaml").write_text(
        "defaults: [slurm, _self_]\npartition: gpu\ntime: '1-12'\n"
    )
    assert main("fit", ["conf=mlp", "launcher=mine", "launcher.dry_run=true"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --partition=gpu" in text and "#SBATCH --time=1-12" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launcher.nodez=2"], "launcher.nodez is not a setting. Did you mean 'nodes'?"),
        (["launcher.nodes=0"], "launcher.nodes is 0; it must be a whole number, 1 or more."),
        (["launcher.nodes=two"], "launcher.nodes is 'two'"),
        (
            ["launcher.time=4h"],
            "launcher.time is '4h'; it must be a time as Slurm takes it: '90:00' (minutes:seconds)",
        ),
        (["launcher.time=90"], "launcher.time is 90, a number, which YAML also makes of 4:00:00"),
        (
            ["launcher.time=00:01:00"],
            "launcher.time is '00:01:00', and launcher.signal, USR1@60, asks for a checkpoint 60 s",
        ),
        (["launcher.time=1:2:3:4"], "launcher.time is '1:2:3:4'; it must be a time"),
        (
            ["launcher.signal=B:USR1@60"],
            "launcher.signal is 'B:USR1@60'; it must be USR1 or TERM, and how many seconds",
        ),
        (["launcher.signal=KILL@60"], "launcher.signal is 'KILL@60'"),
        (
            ["launcher.gpus_per_node=a100"],
            "launcher.gpus_per_node is 'a100'; it must be a number, 1 or more, or a type",
        ),
        (["launcher.array=0-3"], "launcher.array is '0-3'; a job is one run."),
        (
            ["launcher.extra={array: 1-2}"],
            "launcher.extra has 'array', which launcher=slurm sets: a job is one run.",
        ),
        (
            ["launcher.extra={mem: 4G}"],
            "launcher.extra has 'mem', which is a setting of its own: launcher.mem=...",
        ),
        (
            ["launcher.extra={--no-requeue: true}"],
            "launcher.extra has 'no_requeue', which is a setting of its own",
        ),
        (["launcher.setup=x"], "launcher.setup is 'x'; it must be a list"),
        (
            ["engine=single", "launcher.nodes=2"],
            "engine is single, and launcher=slurm asks for several ranks",
        ),
        (
            ["callbacks=elastic"],
            "callbacks.elastic is set, and launcher is slurm: its jobs keep their ranks",
        ),
        (
            ["trainer.enable_checkpointing=false"],
            "a job of launcher=slurm may start several times",
        ),
        (
            ["engine.num_groups=3", "launcher.nodes=2"],
            "engine.num_groups: this launcher's engine is 'ddp'",
        ),
    ],
)
def test_mistakes_are_explained(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Key, value, what is legal; before Slurm is asked, and nothing is left."""
    assert run(*words) != 0
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error and len(error) < 1000
    assert list(tmp_path.iterdir()) == []


def test_several_jobs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """-m with launcher=slurm, once and not for each job; a sweep on Slurm is submitit's."""
    assert run("-m", "seed=1,2") == 2
    error = capsys.readouterr().err
    assert error.count("-m runs several jobs in this process, and launcher=slurm submits one.") == 1
    assert "submitit_slurm" in error and "failed" not in error


def test_a_rank_takes_no_notice_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single task is a rank too, if the config itself has launcher=slurm;
    another launcher's rank may not submit.
    """
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(
        ConfigError,
        match="launcher is slurm, and this process was started by horovodrun: two launchers",
    ):
        compose("fit", ["conf=mlp", "launcher=slurm"], True, lambda job: None)
    monkeypatch.delenv("HOROVOD_RANK")
    for name, value in {
        "TRAINKIT_LAUNCHER": "slurm",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_STEP_NUM_TASKS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    jobs: list[Any] = []
    compose("fit", ["conf=mlp", "launcher=slurm", f"run_dir={tmp_path}"], True, jobs.append)
    assert not starts_ranks(jobs[0].config)


def test_without_slurm_it_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sbatch, or no squeue: what to do, and nothing half begun."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run("run_dir=new/run") == 2
    assert "There is no sbatch on this machine" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_only_fit_is_submitted(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Other commands take weights, and run here."""
    assert run(command=command) == 2
    assert (
        f"launcher is slurm, which is for fit; {command} runs in this process"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("reasons", "line"),
    [
        (
            ["PartitionNodeLimit"],
            "PartitionNodeLimit in partition main, which is about launcher.nodes",
        ),
        (["None", "PartitionConfig", "PartitionTimeLimit"], "which is about launcher.time"),
        (["QOSMaxCpuPerJobLimit"], "which is about what one job may ask for"),
        (["Priority"], None),
        (["QOSMaxJobsPerUserLimit"], None),
    ],
)
def test_a_submitted_job(
    reasons: list[str],
    line: str | None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands that are printed hold in any folder;
    a job that waits forever is said, whenever Slurm gives the reason.
    """
    answers = iter(reasons)

    def program(
        name: str, words: list[str], text: str = "", **_: Any
    ) -> subprocess.CompletedProcess[str]:
        out = "7" if name == "sbatch" else f"7|PENDING|{next(answers)}|0:00|1:00|main|"
        return subprocess.CompletedProcess([name], 0, out, "")

    monkeypatch.setattr("trainkit.extensions.slurm.launcher.run_program", program)
    monkeypatch.setattr("trainkit.extensions.slurm.jobs.run_program", program)
    monkeypatch.setattr("trainkit.extensions.slurm.launcher._ASK_AGAIN_S", 0.0)
    assert run("run_dir=far away/run") == 0
    text = capsys.readouterr().out
    assert (
        f"jobs logs '{tmp_path}/far away/run'" in text
        and f"trainkit jobs '{tmp_path}/far away'" in text
    )
    assert (line in text) if line else "cannot start" not in text


def test_variables_of_the_shell_do_not_replace_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SBATCH_PARTITION and the like have precedence over a script, but not over the command line;
    what is not set by the launcher is left to them, except what is not for one run.
    """
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/given"\nenv > "{tmp_path}/env"\n'
        f'cat > "{tmp_path}/script"\necho 7\n'
    )
    sbatch.chmod(0o755)
    squeue = sbatch.with_name("squeue")
    squeue.write_text("#!/bin/sh\necho '7|PENDING|Priority|0:00|1:00|main|'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    variables = {"PARTITION": "other", "RESERVATION": "mine", "ARRAY_INX": "1-4"}
    variables |= {"ERROR": "elsewhere", "WAIT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")  # of the job that submits: sbatch passes it on
    words = ("launcher.partition=gpu", 'launcher.constraint="a100&ib"', "launcher.requeue=false")
    assert run("run_dir=my 50% run", *words) == 0, capsys.readouterr().err
    given = (tmp_path / "given").read_text().splitlines()
    assert given[0] == "--parsable" and "--no-requeue" in given
    assert "--partition=gpu" in given and "--constraint=a100&ib" in given
    assert f"--output={tmp_path}/my 50%% run/slurm/%j.out" in given
    lines = (tmp_path / "script").read_text().splitlines()
    assert len([line for line in lines if line.startswith("#SBATCH ")]) == len(given) - 1
    left = re.findall("^(SBATCH_.*|SLURM_RES.*)=", (tmp_path / "env").read_text(), re.MULTILINE)
    assert sorted(left) == ["SBATCH_PARTITION", "SBATCH_RESERVATION"]


@pytest.mark.parametrize(
    ("given", "first", "later"),
    [
        ([], ["resume=auto"], ["resume=auto"]),
        (["ckpt_path=o/last"], ["ckpt_path=o/last"], ["ckpt_path=o/last", "resume=auto"]),
        (
            ["ckpt_path=o/last", "resume=auto"],
            ["ckpt_path=o/last", "resume=auto"],
            ["ckpt_path=o/last", "resume=auto"],
        ),
        (["ckpt_path=last"], ["ckpt_path=last"], ["ckpt_path=null", "resume=auto"]),
        (
            ["ckpt_path='my run/checkpoints/one'"],
            ["ckpt_path='my run/checkpoints/one'"],
            ["ckpt_path=null", "resume=auto"],
        ),
    ],
)
def test_where_each_start_begins(
    given: list[str],
    first: list[str],
    later: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Later starts resume from the run's own checkpoint, and begin at PATH if the job was lost before
    it had one.
    """
    text = script(capsys, *given)
    for restarts, expected in ((0, first), (1, later), (2, later)):
        code, words, printed = started(text, tmp_path, restarts=restarts)
        assert (code, printed) == (0, "")
        assert words[-len(expected) :] == expected
        assert words[-len(expected) - 1].startswith("run_dir=")


def end_at(folder: Path, step: int | None) -> str:
    """Return a line of shell that ends a start as a signal does: in a run at a step, or while Python
    starts.
    """
    if step is None:
        return "exit 143"
    known = Progress(
        Moment.now(), "host", 1, None, step=step, starts=[FitStart(0.0, 3, 2, "resume")]
    )
    write_progress(folder, known)
    return f'cp {folder}/{FILE} "my run"; touch "$TRAINKIT_SLURM_REQUEUE"'


@pytest.mark.parametrize(
    ("steps", "codes"),
    [
        ([None] * 5, [75] * 4 + [1]),
        ([7] * 5 + [9], [75] * 4 + [1, 75]),
        ([7, None, None, 8, None, None, None, None], [75] * 7 + [1]),
        ([1, 2, 3, 4, 5, 6, 7], [75] * 7),
    ],
)
def test_starts_that_get_no_further_are_not_repeated_forever(
    steps: list[int | None], codes: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit that is shorter than a start: five of them end at the same step, and that is said."""
    text, seen = script(capsys), list[int]()
    for step in steps:
        code, _, printed = started(text, tmp_path, end_at(tmp_path, step), len(seen))
        seen.append(code)
        assert ("[slurm] 5 starts in a row ended at the same step" in printed) == (code == 1)
    assert seen == codes
    assert (tmp_path / "requeued").read_text() == "requeue 7\n" * codes.count(75)
    assert started(text, tmp_path)[0] == 0
    assert not list((tmp_path / "my run" / "slurm").iterdir())


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_setup_that_ends_at_errors_ends_no_requeue(
    restarts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`set -euo pipefail`, as site scripts have it, would end the script at srun's exit code."""
    text = script(capsys, "launcher.setup=['set -euo pipefail']", "ckpt_path=/other/last")
    code, _, printed = started(text, tmp_path, "exit 143", restarts)
    assert (code, printed) == (75, "")
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert started(text, tmp_path, "exit 3", restarts)[0] == 3
    assert started(text, tmp_path, "", restarts)[0] == 0
    assert not list((tmp_path / "my run" / "slurm").iterdir())
