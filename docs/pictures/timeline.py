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
WIDTH, HEIGHT = 1000, 640


def main() -> None:
    """Record steps, and take the first screen of their report."""
    with tempfile.TemporaryDirectory() as folder:
        for command in (RECORD, REPORT):
            subprocess.run(command, shell=True, cwd=folder, check=True)
        (report,) = Path(folder).rglob("*.html")
        with launched(offline=True) as page:
            page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
            page.goto(report.as_uri())
            page.screenshot(path=str(Path(__file__).with_name("timeline.png")))


if __name__ == "__main__":
    main()
