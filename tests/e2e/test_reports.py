"""Timeline, scaling and doctor as a user runs them:
real ranks under horovodrun, the pages in a real browser.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import covered, opened, perfetto
from tests.helpers.launching import Command, run_command

pytestmark = pytest.mark.parallel

SLOW = "'callbacks.faults.faults=[{do: slow, rank: 1, step: 18, seconds: 0.15}]'"
RECORD = "callbacks.timeline.start_step=14 callbacks.timeline.num_steps=12"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks on Horovod, of which one is slow from step 18 on,
    with steps 14 to 25 recorded.
    """
    folder = tmp_path_factory.mktemp("run")
    done = run_command(
        f"horovodrun -np 2 python -m trainkit fit conf=mlp 'callbacks=[timeline,faults]' {RECORD}"
        f" {SLOW} trainer.max_steps=30 trainer.max_epochs=10 data.batch_size=4 run_dir=run",
        folder,
    )
    assert done.code == 0, done.text
    assert (
        "Timeline: recording steps 14 to 25" in done.text
        and "opens in ui.perfetto.dev" in done.text
    )
    assert "USDT" not in done.text, "torch's profiler prints of its own affairs"
    return folder / "run"


@pytest.fixture(scope="module")
def insight(run: Path) -> str:
    """What `trainkit timeline` prints about the run."""
    done = run_command("python -m trainkit timeline run", run.parent)
    assert done.code == 0, done.text
    return done.text


def test_the_slow_rank_is_named(insight: str) -> None:
    """The slowest rank is named with its first slow step and its delay."""
    match = re.search(
        r"Rank 1 on \S+ is the slowest since step (\d+): in \d+ of \d+ steps the last, by (\d+)",
        insight,
    )
    assert match, insight
    assert 17 <= int(match[1]) <= 19 and 120 <= float(match[2]) <= 250
    assert re.search(r"make rank 1 on \S+ as fast as the others +│ +up to \d+ %", insight)


def test_each_gradient_has_its_way(insight: str, run: Path) -> None:
    """The trace holds each gradient of the model by name, on both ranks."""
    assert "negotiation" in insight and re.search(
        r"│ model\S*weight +│ +[\d.]+ KiB +│ +[\d.]+ ms", insight
    )
    (folder,) = (run / "timeline").glob("steps-*")
    assert sorted(path.name for path in folder.iterdir()) == [
        "horovod-0.json", "horovod-1.json", "rank-0.json", "rank-1.json", "torch-0.json.gz", "torch-1.json.gz", "trace.json.gz",
    ]  # fmt: skip
    events: list[dict[str, Any]] = json.loads(
        gzip.decompress((folder / "trace.json.gz").read_bytes())
    )["traceEvents"]
    for rank in (0, 1):
        own = [e for e in events if e["pid"] == rank]
        assert {"step 20", "forward", "aten::mm", "GLOO_ALLREDUCE"} <= {e["name"] for e in own}
        backward = next(e for e in own if e["name"] == "backward" and e["args"]["step"] == 20)
        until = backward["ts"] + backward["dur"]
        inside = [
            e
            for e in own
            if e["name"].startswith("autograd::engine") and backward["ts"] <= e["ts"] < until
        ]
        assert inside, "torch's events lie where ours say that backward was: the clocks are aligned"


def test_perfetto_takes_all_of_it(run: Path) -> None:
    """Perfetto imports the trace without an error and shows each
    rank as a process with its tracks.
    """
    (trace,) = (run / "timeline").glob("steps-*/trace.json.gz")
    with perfetto(trace) as ask:
        assert ask("select name from stats where value > 0 and severity <> 'info'").startswith(
            " (0 rows)"
        )
        tracks = ask(
            "select p.name || ': ' || t.name as track from thread t join process p using (upid)"
        )
        for rank in (0, 1):
            for track in ("steps", "Horovod", r"torch, thread \d+"):
                assert re.search(rf"rank {rank} on \S+ \(cpu\): {track}", tracks), track
        gradients = ask("select count(distinct name) as n from slice where category = 'gradient'")
        assert re.search(r"\n6\n", gradients.replace("\t", "\n")), gradients


def test_the_page_opens_without_a_network(run: Path, insight: str, tmp_path: Path) -> None:
    """The page draws all charts without a request or a script error,
    and another rank can be chosen.
    """
    with opened(run / "reports" / "timeline.html") as seen:
        assert seen.errors == [] and seen.asked_for == []
        for part in ("parts", "steps", "step", "late", "gradients"):
            assert seen.page.locator(f"#{part} .js-plotly-plot .main-svg").first.is_visible(), part
        assert "Rank 1 on" in seen.page.locator("#words").inner_text()
        bars = seen.page.locator("#parts .bars .point path")
        boxes = [bars.nth(i).bounding_box() for i in range(bars.count())]
        assert sum(box is not None and box["width"] > 1 for box in boxes) >= 6
        assert covered(seen.page) == []
        of_rank_0 = _shapes(seen.page)
        seen.page.locator("#steps .updatemenu-header").click()
        seen.page.locator("#steps .updatemenu-dropdown-button", has_text="rank 1").click()
        seen.page.wait_for_timeout(500)
        assert _shapes(seen.page) != of_rank_0


def _shapes(page: Any) -> list[str]:
    """Return the outlines of all bars: a single one may have the same pixels on both ranks."""
    bars = page.locator("#steps .bars .point path")
    return [bars.nth(i).get_attribute("d") for i in range(bars.count())]


def job_of(*settings: str) -> list[str]:
    """Return the command of a job of two ranks that trains until it is ended,
    with these settings of Timeline.
    """
    quiet = [
        "trainer.max_epochs=100000",
        "trainer.limit_val_batches=0",
        "logger=none",
        "trainer.enable_checkpointing=false",
    ]
    own = [f"callbacks.timeline.{setting}" for setting in ("torch_profiler=false", *settings)]
    start = [
        sys.executable,
        "-m",
        "horovod.runner.launch",
        "--gloo",
        "-np",
        "2",
        sys.executable,
        "-m",
        "trainkit",
        "fit",
    ]
    return [*start, "conf=mlp", "run_dir=run", "callbacks=timeline", *own, *quiet]


def test_a_killed_job_leaves_a_recording_that_can_be_read(command: Command, tmp_path: Path) -> None:
    """If both ranks are killed while they record, the command shows the recorded steps."""
    start = job_of("start_step=3", "num_steps=100000")
    job = subprocess.Popen(
        start,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 60
        pieces = lambda: [  # noqa: E731
            p for p in tmp_path.glob("run/timeline/*/rank-?.json") if p.stat().st_size > 200_000
        ]
        while len(pieces()) < 2:
            assert job.poll() is None and time.monotonic() < until, "it does not record"
            time.sleep(0.05)
    finally:
        for pid in _of_group(job.pid):
            os.kill(pid, signal.SIGKILL)
        job.wait()
    done = command("python -m trainkit timeline run")
    assert done.code == 0, done.text
    assert re.search(r"Steps 3 to \d+ on 2 ranks \(horovod, cpu\)", done.text)
    assert (tmp_path / "run" / "reports" / "timeline.html").is_file()


def _of_group(group: int) -> list[int]:
    """Return the processes of a job:
    horovodrun's, and its ranks, which have groups of their own.
    """
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "stat").read_text().rpartition(")")[2].split()
            text = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if int(words[3]) == group or b"callbacks.timeline.num_steps=100000" in text:
            processes.append(int(path.name))
    return processes


def test_a_running_job_records_when_it_is_asked(command: Command, tmp_path: Path) -> None:
    """`record=3` makes all ranks of a running job record three steps."""
    start = job_of("start_step=null")
    job = subprocess.Popen(
        start, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert job.stdout is not None
        for text in job.stdout:
            if "epoch 3" in text:
                break
        asked = command("python -m trainkit timeline run record=3")
        assert asked.code == 0, asked.text
        until = time.monotonic() + 60
        while (
            not list(tmp_path.glob("run/timeline/steps-*/rank-1.json")) and time.monotonic() < until
        ):
            time.sleep(0.05)
        time.sleep(1.0)
    finally:
        job.terminate()
        job.communicate(timeout=60)
    done = command("python -m trainkit timeline run")
    first, last = map(int, re.search(r"Steps (\d+) to (\d+) on 2 ranks", done.text).groups())  # type: ignore[union-attr]
    assert last - first == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nowhere", "There is no folder nowhere"),
        (".", "callbacks=timeline"),
        (". recrod=3", "recrod=3 is not understood"),
        (". record=3", "No job trains in ."),
        (". record=0", "record is '0'; it must be a number of steps, 1 or more"),
    ],
)
def test_mistakes_are_named(command: Command, arguments: str, says: str) -> None:
    """Bad input ends with exit code 2 and a message that says what to do."""
    done = command(f"python -m trainkit timeline {arguments}")
    assert done.code == 2 and says in done.text and "Traceback" not in done.text


def test_scaling_measures_predicts_and_checks_itself(command: Command, tmp_path: Path) -> None:
    """scaling prints both numbers of ranks, checks its model at the one left out,
    and writes a page.
    """
    done = command(
        "python -m trainkit scaling conf=mlp ranks=1,2 steps=12 gbits=10,100 run_dir=scale"
        " data.batch_size=64"
    )
    assert done.code == 0, done.text
    assert re.search(r"│ 1 +│ +[\d.]+ ms │ +[\d.,]+ │ +100.0 % │", done.text) and re.search(
        r"│ 2 +│ +[\d.]+ ms", done.text
    )
    assert re.search(
        r"Left out of the model: the steps of 2 ranks. It predicts [\d.]+ ms a step there, measured"
        r" were [\d.]+ ms",
        done.text,
    )
    assert re.search(r"│ 512 +│( +\d+ % │){3}", done.text)
    numbers = json.loads((tmp_path / "scale" / "reports" / "scaling.json").read_text())
    assert [m["ranks"] for m in numbers["measured"]] == [1, 2] and numbers["ring"][
        "bytes_per_s"
    ] > 1e6
    with opened(tmp_path / "scale" / "reports" / "scaling.html") as seen:
        assert seen.errors == [] and seen.asked_for == []
        assert seen.page.locator(".js-plotly-plot").count() == 2
        assert covered(seen.page) == []
        # as measured, two networks, the measured ones
        assert seen.page.locator("#predicted .scatterlayer .trace").count() == 4


def test_scaling_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGTERM ends scaling with its ranks, and the message names the folder of the recordings."""
    start = [
        sys.executable,
        "-m",
        "trainkit",
        "scaling",
        "conf=mlp",
        "ranks=2,3",
        "steps=100000",
        "run_dir=scale",
    ]
    quiet = ["trainer.max_epochs=100000", "data.batch_size=2"]
    job = subprocess.Popen([*start, *quiet], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "scale" / "ranks-2" / "output.log"
    until = time.monotonic() + 300
    try:
        while not (log.exists() and "recording" in log.read_text()):
            assert job.poll() is None and time.monotonic() < until, "it does not train"
            time.sleep(0.1)
    finally:  # its ranks would train for hours
        job.terminate()
        out, _ = job.communicate(timeout=60)
    assert job.returncode == 130 and "Stopped; the recordings so far are in" in out
    until = time.monotonic() + 20  # the kernel takes apart what was ended
    while (left := _processes_with(str(tmp_path))) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def _processes_with(text: str) -> list[str]:
    every = map(_text_of, Path("/proc").glob("[0-9]*/cmdline"))
    return [line.replace(b"\0", b" ").decode() for line in every if text.encode() in line]


def _text_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "ranks is missing"),
        ("ranks=1,x", "ranks is 'x'; it must be a whole number"),
        ("ranks=1 gbits=0", "gbits is '0'"),
        ("ranks=1 gbits=nan", "gbits is 'nan'"),
        ("ranks=1 steps=0", "steps is '0'"),
        ("ranks=1,2 engine=single", "engine=single has one rank"),
        ("ranks=1 optimizer.lrr=1", "optimizer.lrr"),
    ],
)
def test_what_scaling_cannot_do_is_refused(command: Command, arguments: str, says: str) -> None:
    """Bad input is refused before any rank starts."""
    done = command(f"python -m trainkit scaling conf=mlp {arguments}")
    assert done.code == 2 and says in done.text and "Traceback" not in done.text


def test_no_toolbar_covers_what_is_read(command: Command, tmp_path: Path) -> None:
    """On the pages of `show`, of one run and of two, and of `test`, at 1280 and at 400 pixels."""
    for name in ("a", "b"):
        done = command(
            "python -m trainkit fit conf=mlp trainer.max_epochs=2 trainer.log_every_n_steps=2"
            f" run_dir=runs/{name}"
        )
        assert done.code == 0, done.text
    commands = ("test run_dir=runs/a", "show runs/a", "show runs/a runs/b")
    done = command(" && ".join(f"python -m trainkit {words}" for words in commands))
    assert done.code == 0, done.text
    pages = sorted((tmp_path / "runs" / "a" / "reports").glob("*.html"))
    assert [page.name for page in pages] == ["runs.html", "show.html", "test.html"]
    for path in pages:
        with opened(path) as seen:
            assert covered(seen.page) == [], path.name


def test_doctor_lets_two_ranks_add(command: Command) -> None:
    """doctor reports an allreduce of two ranks under both launchers, as JSON."""
    done = command("python -m trainkit doctor --json")
    assert done.code == 0, done.text
    findings = {
        finding["name"]: finding for finding in json.loads(done.text[done.text.index("[") :])
    }
    for launcher in ("horovodrun", "torchrun"):
        assert re.match(
            r"right, on cpu: \d+\.\d\d GB/s at 32 MiB",
            findings[f"allreduce under {launcher}"]["value"],
        )
    assert findings["installed"]["value"].startswith("0.28.1+trainkit.")
