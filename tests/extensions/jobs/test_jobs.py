"""jobs without a cluster: nothing submitted, and words that are none of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.extensions.jobs.command import main


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 0, "No run in or below runs was submitted as a job."),
        (["runs"], 2, "There is no folder runs."),
        (["."], 0, "No run in or below . was submitted as a job."),
        ([".", "extra"], 2, "'extra' is one too many"),
        (["logs"], 2, "jobs logs needs a job: its number or name, or its run's folder."),
        (["logs", "7"], 2, "No run below runs/ was submitted as job 7."),
        (
            ["logs", "."],
            2,
            "'.' is no number of a job, no folder of a run that launcher=slurm submitted,",
        ),
        (["logs", "7", "line=3"], 2, "'line' is no setting of jobs. Did you mean 'lines'?"),
        (["lines=3"], 2, "'lines' is no setting of jobs. Use none."),
        (["cancel"], 2, "jobs cancel needs a job"),
    ],
)
def test_words_are_checked(
    words: list[str],
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without Slurm, which is asked only about jobs that were found."""
    monkeypatch.chdir(tmp_path)
    assert main("jobs", words) == code
    done = capsys.readouterr()
    assert text in done.out + done.err
