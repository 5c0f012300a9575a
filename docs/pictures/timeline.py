"""Draws docs/pictures/timeline.png from a recording of two ranks:
`python -m docs.pictures.timeline` (two minutes on 2 cores; needs Chromium).
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.helpers.browser import launched

RECORD = (
    "horovodrun -np 2 python -m trainkit fit conf=resnet50 trainer.max_steps=30 callbacks=timeline"
    " run_dir=runs/seen"
)
REPORT = "python -m trainkit timeline runs/seen"
WIDTH = 1000


def main() -> None:
    """Record steps, and draw one of them on both ranks, as their report has it."""
    with tempfile.TemporaryDirectory() as folder:
        for command in (RECORD, REPORT):
            subprocess.run(command, shell=True, cwd=folder, check=True)
        (report,) = Path(folder).rglob("*.html")
        with launched(offline=True) as page:
            page.set_viewport_size({"width": WIDTH, "height": WIDTH})
            page.goto(report.as_uri())
            page.wait_for_selector("#step .main-svg")
            page.locator("#step").screenshot(path=str(Path(__file__).with_name("timeline.png")))


if __name__ == "__main__":
    main()
