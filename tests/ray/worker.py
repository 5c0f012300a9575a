"""What the raylets of these tests start for a worker: Ray's default_worker.py, whose `sys.executable`
is a program of tests/helpers/forks.py, so that the ranks that it starts are forks. A worker with a
Python of its own, as a runtime_env may ask for, has that.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    package = importlib.util.find_spec("ray")
    assert package is not None and package.origin is not None
    worker = Path(package.origin).parent / "_private" / "workers" / "default_worker.py"
    _, _, folder = os.environ["TRAINKIT_TEST_FORKS"].partition(":")
    stub = Path(folder, "python")
    if stub.read_text().startswith(f"#!{sys.executable} "):
        sys.executable = str(stub)
    sys.argv[0] = str(worker)
    runpy.run_path(str(worker), run_name="__main__")
