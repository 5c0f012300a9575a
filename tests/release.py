"""`python -m tests.release v0.2.0`: tag, version, changelog and the files in dist/ are of one release.

The release workflow runs it on what `make dist sbom` built, before anything is attested.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version_of(root: Path) -> str:
    """Return the version in trainkit/version.py."""
    text = (root / "trainkit" / "version.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def faults(tag: str, root: Path) -> list[str]:
    """Return what keeps a checkout from being the release of a tag, a sentence each."""
    version = version_of(root)
    wrong = []
    if tag != f"v{version}":
        wrong.append(
            f"The tag is {tag}; trainkit/version.py says {version}, whose tag is v{version}."
        )
    if not re.search(
        rf"^version: {re.escape(version)}$", _text(root, "CITATION.cff"), re.MULTILINE
    ):
        wrong.append(f"CITATION.cff has another version than {version}.")
    if f"\n## [{version}] - " not in _text(root, "CHANGELOG.md"):
        wrong.append(f"CHANGELOG.md has no part '## [{version}] - DAY'.")
    wanted = {
        f"trainkit-{version}-py3-none-any.whl",
        f"trainkit-{version}.tar.gz",
        "trainkit.cdx.json",
    }
    built = {path.name for path in (root / "dist").glob("*")}
    if built != wanted:
        wrong.append(
            f"dist/ holds {', '.join(sorted(built)) or 'nothing'}; it must hold"
            f" {', '.join(sorted(wanted))}: make dist sbom."
        )
    return wrong


def _text(root: Path, name: str) -> str:
    return (root / name).read_text()


if __name__ == "__main__":
    sys.exit("\n".join(faults(sys.argv[1], ROOT)) or 0)
