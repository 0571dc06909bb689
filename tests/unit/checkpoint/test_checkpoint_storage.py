"""What is special about checkpoints in directories: syncing, linking, renaming, and what kills it in between."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError


def everything_below(storage: Storage) -> set[str]:
    root = Path(storage.location)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("prefix", ["", "file:", "file://", "file://localhost"])
def test_plain_paths_and_file_urls_mean_the_same_directory(tmp_path: Path, prefix: str) -> None:
    assert Storage(f"{prefix}{tmp_path}/a b").location == f"{tmp_path}/a b"


def test_a_relative_path_becomes_absolute_so_that_other_processes_can_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Storage("here").location == str(tmp_path / "here")


def test_percent_signs_in_urls_are_taken_as_they_are_as_hadoop_does() -> None:
    assert Storage("file:///a%20b").location == "/a%20b"


@pytest.mark.parametrize("location", ["file://server/share", "file:relative", "file:"])
def test_file_urls_of_other_hosts_or_relative_ones_are_refused(location: str) -> None:
    with pytest.raises(CheckpointError, match="file:///path/to/checkpoint"):
        Storage(location)


def test_an_empty_location_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is empty"):
        Storage("")


def test_without_fsync_the_same_is_written(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path), durable=False)
    storage.write("a/b", b"content")
    assert storage.create("a/c", b"more")
    assert (storage.read("a/b"), storage.read("a/c")) == (b"content", b"more")


def refuse(code: int) -> object:
    def call(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def test_creation_is_exclusive_on_file_systems_without_hard_links(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    assert storage.create("anabranch/file", b"first")
    assert not storage.create("anabranch/file", b"second")
    assert storage.read("anabranch/file") == b"first"
    assert everything_below(storage) == {"anabranch/file"}


def test_creation_succeeds_when_only_the_answer_to_it_was_lost(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert storage.create("anabranch/file", b"first")


def test_directories_that_cannot_be_synced_do_not_stop_a_write(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def only_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    storage.write("anabranch/file", b"content")
    assert storage.read("anabranch/file") == b"content"


def test_a_write_syncs_the_file_then_its_folder_and_every_folder_it_made(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    storage.write("exists", b"")
    monkeypatch.setattr(os, "fsync", record)
    storage.write("a/b/file", b"content")
    root = storage.location
    assert synced[0].startswith(f"{root}/a/b/.file.")
    assert synced[1:] == [f"{root}/a/b", f"{root}/a", root]
    assert storage.read("a/b/file") == b"content"


@pytest.mark.parametrize("call", ["write", "create"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    storage.write("anabranch/old", b"old")
    monkeypatch.setattr(os, "fsync", refuse(code))
    advice = "Free space" if code == errno.ENOSPC else "Check the file system"
    target = "anabranch/old" if call == "write" else "anabranch/new"
    with pytest.raises(CheckpointError, match=advice):
        getattr(storage, call)(target, b"new")
    monkeypatch.undo()
    assert everything_below(storage) == {"anabranch/old"}
    assert storage.read("anabranch/old") == b"old"


@pytest.mark.parametrize("call", ["write", "create"])
def test_a_process_killed_before_the_rename_leaves_nothing_that_counts(storage: Storage, call: str) -> None:
    killed_in_between = f"""
import os, pathlib, signal
from anabranch.checkpoint.storage import Storage
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.replace = die
os.link = die
Storage({storage.location!r}).{call}("anabranch/manifests/file.json", b"half")
"""
    storage.write("anabranch/manifests/other.json", b"whole")
    done = subprocess.run([sys.executable, "-c", killed_in_between], check=False)
    assert done.returncode == -9
    assert len(everything_below(storage)) == 2, "the temporary file is there"
    assert storage.list_names("anabranch/manifests") == ["other.json"]
    assert storage.read_if_present("anabranch/manifests/file.json") is None
    assert storage.create("anabranch/manifests/file.json", b"whole")


def test_a_file_in_the_place_of_the_checkpoint_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = Storage(str(tmp_path / "file"))
    for use in (storage.read, storage.list_names, lambda path: storage.write(path, b"")):
        with pytest.raises(CheckpointError, match=r"Make sure that .*/file and all folders above it are directories"):
            use("anabranch/job.json")


def test_a_refused_permission_is_an_error_that_names_the_directory(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", refuse(errno.EACCES))
    with pytest.raises(CheckpointError, match=r"Permission denied\. Give the user .* access to .*/checkpoint"):
        storage.write("anabranch/job.json", b"")
