"""Which bytes of a tar are which file of which sample."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from trainkit.errors import DataError
from trainkit.extensions.shards.tar import Members

FILES = {"a/0.jpg": b"picture", "a/0.cls": b"3", "b.c/1.seg.PNG": b"x" * 513, "b.c/1.cls": b"4"}


def write(path: Path, files: dict[str, bytes], **options: int) -> Path:
    """Write a tar with a folder's entry in it, which is no sample."""
    with tarfile.open(path, "w", **options) as tar:
        for i, (name, content) in enumerate(files.items()):
            if i == 2:
                folder = tarfile.TarInfo("b.c")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_of_one_key_are_a_sample(form: int, tmp_path: Path) -> None:
    """In each format, long names and names of other alphabets included;
    extensions are lower case.
    """
    long = "long/" * 15 + "\u00e4" * 20 * (form != tarfile.USTAR_FORMAT) + "z" * 60
    path = write(tmp_path / "a.tar", {**FILES, f"{long}.jpg": b"last"}, format=form)
    with path.open("rb") as file:
        members = Members(file, "a.tar")
        assert len(members) == 3
        read = [{kind: content_of(path, at) for kind, at in members[i].items()} for i in range(3)]
        assert read == [
            {"jpg": b"picture", "cls": b"3"},
            {"seg.png": b"x" * 513, "cls": b"4"},
            {"jpg": b"last"},
        ]
        assert [members.key_of(i) for i in range(3)] == ["a/0", "b.c/1", long]


def content_of(path: Path, at: tuple[int, int]) -> bytes:
    """Return the bytes at an offset."""
    return path.read_bytes()[at[0] : at[0] + at[1]]


def test_what_is_no_whole_tar_is_refused(tmp_path: Path) -> None:
    """Wherever it is cut, also between two files; and a compressed one: by its name and size."""
    whole = write(
        tmp_path / "a.tar", {name: content for name, content in FILES.items() if name[0] == "a"}
    ).read_bytes()
    for cut in (100, 512, 1024, 1536, 2048):
        (tmp_path / "cut.tar").write_bytes(whole[:cut])
        with (
            (tmp_path / "cut.tar").open("rb") as file,
            pytest.raises(DataError, match=rf"cut\.tar cannot .* has {cut:,} bytes"),
        ):
            Members(file, "cut.tar")
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as tar:
        tar.add(tmp_path / "a.tar")
    with (
        (tmp_path / "a.tgz").open("rb") as file,
        pytest.raises(DataError, match=r"a\.tgz cannot be read as a tar"),
    ):
        Members(file, "a.tgz")


@pytest.mark.parametrize("second", ["jpg", "JPG"])
def test_a_file_of_a_sample_twice_is_refused(second: str, tmp_path: Path) -> None:
    """It names shard, sample and extension; the same key elsewhere in the tar is a sample of its
    own.
    """
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("a.jpg", "b/0.jpg", "b/0.cls", f"b/0.{second}"):
            tar.addfile(tarfile.TarInfo(name))
    with (
        path.open("rb") as file,
        pytest.raises(DataError, match=r"s3://a\.tar has two files 'jpg' .* sample 'b/0'"),
    ):
        Members(file, "s3://a.tar")
    with tarfile.open(path, "w") as tar:
        for name in ("a.jpg", "b.jpg", "a.jpg"):
            tar.addfile(tarfile.TarInfo(name))
    with path.open("rb") as file:
        assert len(Members(file, "a.tar")) == 3


def test_files_about_the_tar_are_no_samples(tmp_path: Path) -> None:
    """Those whose first name has two underscores around it, as webdataset skips them."""
    path = tmp_path / "a.tar"
    names = ("__meta__/info.json", "__a__", "0.jpg", "a/__b__/1.jpg", "__c.jpg", "__d__.jpg")
    with tarfile.open(path, "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    with path.open("rb") as file:
        members = Members(file, "a.tar")
        keys = [members.key_of(i) for i in range(len(members))]
    assert keys == ["0", "a/__b__/1", "__c", "__d__"]
