"""trainkit's edits to Horovod's source: their id, that all or none apply, and their signatures."""

from __future__ import annotations

import importlib.metadata
import random
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from packaging.version import Version

from trainkit.errors import EngineError
from trainkit.extensions.elastic import signing
from trainkit.extensions.horovod_build import patches as horovod_edits
from trainkit.extensions.horovod_build.patches import (
    apply,
    edited_source,
    edits,
    edits_of,
    identity,
    installed_edits,
    version,
)

PATCH = """\
What it is for.

--- a/horovod/one.py
+++ b/horovod/one.py
@@ -1,3 +1,3 @@
 a
-b
+B
 c
@@ -8,2 +8,3 @@
 h
 i
+j

--- /dev/null
+++ b/horovod/new/two.py
@@ -0,0 +1,2 @@
+x
+y
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source of nine lines."""
    (tmp_path / "tree" / "horovod").mkdir(parents=True)
    (tmp_path / "tree" / "horovod" / "one.py").write_text(
        "".join(f"{letter}\n" for letter in "abcdefghi")
    )
    return tmp_path / "tree"


def test_patch_changes_and_makes_files(tree: Path) -> None:
    """Lines are removed and added at their place, also at the end of a file,
    and new files are created.
    """
    apply("it.patch", PATCH, tree)
    assert (tree / "horovod" / "one.py").read_text().split() == list("aBcdefghij")
    assert (tree / "horovod" / "new" / "two.py").read_text() == "x\ny\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "-b\n",
            "-q\n",
            r"it\.patch does not apply: line 2 of .*one\.py is 'b\\n', and it should be 'q\\n'",
        ),
        (" i\n", " Z\n", r"line 9 of .*one\.py is 'i\\n'"),
        ("@@ -8,2 +8,3", "@@ -9,2 +9,3", r"line 9 of .*one\.py is 'i\\n', and it should be 'h\\n'"),
        (" i\n", " i\n+k\n", r"hunk 2 of horovod/one\.py .* ends before"),
        ("+y\n", "", r"hunk 1 of horovod/new/two\.py .* ends before"),
        ("/one.py", "/none.py", r"it\.patch does not apply: .*none\.py cannot be read"),
        ("--- a/", "--- ", r"it\.patch is damaged: no file is named"),
        (PATCH, "words\n", r"it\.patch is damaged: no file is named"),
    ],
)
def test_patch_that_does_not_fit_changes_nothing(
    old: str, new: str, message: str, tree: Path
) -> None:
    """A line that is not exactly at its place is an error with patch, file and line,
    and no file is changed.
    """
    before = (tree / "horovod" / "one.py").read_text()
    text = PATCH.replace(old, new)
    with pytest.raises(EngineError, match=message):
        apply("it.patch", text, tree)
    assert (tree / "horovod" / "one.py").read_text() == before
    assert not (tree / "horovod" / "new").exists()


def test_new_file_replaces_none(tree: Path) -> None:
    """A file that an edit creates must not exist yet."""
    (tree / "horovod" / "new").mkdir()
    (tree / "horovod" / "new" / "two.py").touch()
    with pytest.raises(EngineError, match=r"it creates .*two\.py, which exists already"):
        apply("it.patch", PATCH, tree)


def test_every_edit_says_what_it_is_for() -> None:
    """Each patch begins with an explanation,
    and changes files of Horovod or of its bundled sources.
    """
    assert len(edits()) >= 8
    for patch, text in edits().items():
        assert len(text.partition("\n--- ")[0].split()) > 8, patch
        assert re.findall(r"^\+\+\+ b/(horovod|third_party)/\S+$", text, re.MULTILINE), patch
        assert not re.search(r"[^\x00-\x7f]", text), patch


def test_every_edit_is_listed() -> None:
    """In the page that docs/horovod.md names, in order."""
    page = (Path(horovod_edits.__file__).parent / "README.md").read_text()
    listed = re.findall(r"^\| \[`(\w+)`\]\(horovod-0\.28\.1/(\w+\.patch)\)", page, re.MULTILINE)
    assert [f"{name}.patch" for name, _ in listed] == [file for _, file in listed] == [*edits()]


def test_name_follows_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any change in an edit changes the id: a wheel of other edits is never used for these."""
    folder = tmp_path / "edits"
    shutil.copytree(horovod_edits._FOLDER, folder)
    monkeypatch.setattr(horovod_edits, "_FOLDER", folder)
    edits.cache_clear()
    before = identity()
    patch = sorted(folder.glob("*.patch"))[-1]
    patch.write_text(patch.read_text() + "\n")
    edits.cache_clear()
    after = identity()
    edits.cache_clear()
    assert before != after
    assert re.fullmatch(r"e[0-9a-f]{8}", after)


def test_version_names_the_edits() -> None:
    """The version is Horovod's with a local part that pip does not change, and contains the id."""
    assert str(Version(version())) == version() == f"0.28.1+trainkit.{identity()}"
    assert edits_of(version()) == edits_of(f"{version()}.torch2.15.0") == identity()
    assert edits_of("0.28.1") is None
    assert edits_of("0.28.1+cpu") is None


def test_installed_edits_are_asked_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock Horovod has no edits, nor has a missing one."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.28.1")
    assert installed_edits() is None
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.28.1+trainkit.e1234")
    assert installed_edits() == "e1234"

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert installed_edits() is None


def _release(folder: Path, init: str) -> Path:
    """Return an archive like the release."""
    package = folder / "horovod-0.28.1" / "horovod"
    package.mkdir(parents=True)
    (package / "one.py").write_text("".join(f"{letter}\n" for letter in "abcdefghi"))
    (package / "__init__.py").write_text(init)
    with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(folder / "horovod-0.28.1", "horovod-0.28.1")
    return folder / "horovod-0.28.1.tar.gz"


def test_source_is_unpacked_edited_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built tree has the edits, and its version contains their id."""
    archive = _release(tmp_path, "__version__ = '0.28.1'\n")
    monkeypatch.setattr(horovod_edits, "edits", lambda: {"it.patch": PATCH})
    root = edited_source(archive, tmp_path / "source", "0.28.1+trainkit.e1.torch2.15.0")
    assert (root / "horovod" / "one.py").read_text().split() == list("aBcdefghij")
    assert (
        root / "horovod" / "__init__.py"
    ).read_text() == "__version__ = '0.28.1+trainkit.e1.torch2.15.0'\n"


@pytest.mark.parametrize("init", ["__version__ = '0.28.0'\n", ""])
def test_source_of_another_version_is_refused(
    init: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the version is not the release's nothing is built."""
    archive = _release(tmp_path, init)
    monkeypatch.setattr(horovod_edits, "edits", lambda: {"it.patch": PATCH})
    with pytest.raises(EngineError, match=r"__init__\.py has no line __version__ = '0\.28\.1'"):
        edited_source(archive, tmp_path / "source", version())


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    """A file that is no archive ends in words."""
    (tmp_path / "horovod-0.28.1.tar.gz").write_bytes(b"no archive")
    with pytest.raises(EngineError, match="cannot be unpacked"):
        edited_source(tmp_path / "horovod-0.28.1.tar.gz", tmp_path / "source", version())


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_cpp_signs_as_python_does(tmp_path: Path) -> None:
    """Horovod's C++ side makes the same signatures as extensions.elastic.signing,
    for bodies around the block size and longer.
    """
    text = (horovod_edits._FOLDER / "signed_store.patch").read_text()
    header = re.search(r"\+\+\+ b/\S*/signature\.h\n@@.*@@\n((?:\+.*\n)+)", text)
    assert header is not None
    (tmp_path / "signature.h").write_text(
        "".join(line[1:] for line in header[1].splitlines(keepends=True))
    )
    (tmp_path / "main.cc").write_text("""
        #include "signature.h"
        #include <cstdio>
        int main(int, char** given) {
          std::string body(std::stoul(given[3]), 0);
          for (std::size_t i = 0; i < body.size(); ++i) body[i] = char(7 * i + i / 256);
          std::puts(horovod::common::signature::Sign(given[1], "PUT", given[2], "c0ffee.7", body).c_str());
        }""")
    subprocess.run(
        ["c++", "-std=c++14", "-Wall", "-Werror", "main.cc", "-o", "main"], cwd=tmp_path, check=True
    )
    for size in [0, 1, 30, 31, 32, *range(50, 70), *range(110, 130), 4096, 70_001]:
        secret = "".join(random.choices("0123456789abcdef", k=random.choice([1, 63, 64, 65, 200])))
        signed = subprocess.check_output(
            [tmp_path / "main", secret, "/g3.global/0", str(size)], text=True
        ).strip()
        body = bytes((7 * i + i // 256) % 256 for i in range(size))
        assert signed == signing.sign(secret, "PUT", "/g3.global/0", "c0ffee.7", body), size
