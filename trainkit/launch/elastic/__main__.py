"""`python -m trainkit.launch.elastic`, with horovodrun's options:
for tests, and for a horovodrun without trainkit's edits.
"""

from __future__ import annotations

import sys

from trainkit.launch.elastic import main

if __name__ == "__main__":
    sys.exit(main())
