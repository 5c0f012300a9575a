"""The workflows: actions are pinned by hash, rights are few, and a release is one release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.release import faults

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_hash(path: Path) -> None:
    """A tag of another project can be moved; a hash cannot. Its version stands beside it."""
    used = re.findall(r"uses: (.+)", path.read_text())
    assert used
    assert [action for action in used if not PINNED.fullmatch(action.strip())] == []


def test_one_version_of_an_action_is_used() -> None:
    """All workflows use the same hash of an action."""
    used = re.findall(r"uses: (\S+)@(\S+)", "\n".join(path.read_text() for path in WORKFLOWS))
    assert len(set(used)) == len({name for name, _ in used})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read(path: Path) -> None:
    """By default; a job of the release may have an identity, and nothing may write to the
    repository.
    """
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        more = {key for key, value in job.get("permissions", {}).items() if value == "write"}
        allowed = {"build": {"id-token", "attestations"}, "publish": {"id-token"}}
        assert more <= (allowed.get(name, set()) if path.stem == "release" else set()), name


def test_a_release_begins_with_a_tag_and_waits_for_approval() -> None:
    """No push and no pull request publishes; what publishes runs in an environment of its own."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert workflow["jobs"]["publish"]["environment"] == "pypi"
    assert workflow["jobs"]["publish"]["needs"] == "build"


def test_each_file_that_a_release_is_made_of_has_owners() -> None:
    """A moved file would lose them unseen."""
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    owners = dict(line.split() for line in lines if line and not line.startswith("#"))
    assert owners.pop("*") == "@OWNER/maintainers"
    assert [path for path in owners if not (ROOT / path.lstrip("/")).exists()] == []
    assert {"/.github/", "/pyproject.toml", "/trainkit/extensions/horovod_build/"} <= set(owners)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of a release 1.2.3, in order."""
    (tmp_path / "trainkit").mkdir()
    (tmp_path / "trainkit" / "version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2026-11-27\n")
    (tmp_path / "dist").mkdir()
    for name in ("trainkit-1.2.3-py3-none-any.whl", "trainkit-1.2.3.tar.gz", "trainkit.cdx.json"):
        (tmp_path / "dist" / name).touch()
    return tmp_path


def test_a_release_in_order_has_no_fault(checkout: Path) -> None:
    """Tag, version, citation, changelog and files agree."""
    assert faults("v1.2.3", checkout) == []


def test_each_disagreement_is_named(checkout: Path) -> None:
    """Another tag, an open changelog, a missing file and an old citation, a sentence each."""
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    (checkout / "CITATION.cff").write_text("version: 1.2.2\n")
    (checkout / "dist" / "trainkit.cdx.json").unlink()
    text = " ".join(faults("v1.3.0", checkout))
    for part in ("tag is v1.3.0", "v1.2.3", "CITATION.cff", "CHANGELOG.md", "trainkit.cdx.json"):
        assert part in text
    assert len(faults("v1.3.0", checkout)) == 4
