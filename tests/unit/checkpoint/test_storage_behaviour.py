"""What a storage does, whatever is behind it."""

import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from support.s3_server import S3Server, running_s3

#: More than what opening a file reads of it, and more than one part of a copy.
LARGE = bytes(range(256)) * (20 * 2**20 // 256)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return new_location(request.param, request, tmp_path)


def new_location(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "s3":
        return f"{request.getfixturevalue('s3').new_bucket()}/some/checkpoint"
    return f"{'local://' if kind == 'moved' else ''}{tmp_path}/{kind}/checkpoint"


@pytest.fixture
def storage(location: str) -> Storage:
    return Storage(location)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that create run on checkpoints; all others on file systems too that can do no more than move files."""
    if "location" in metafunc.fixturenames:
        kinds = ["local", "s3"] if "creat" in metafunc.function.__name__ else ["local", "s3", "moved"]
        metafunc.parametrize("location", kinds, indirect=True)


def everything_below(storage: Storage) -> set[str]:
    return {path for path, _, _ in storage.walk("")}


def test_the_location_means_the_same_to_another_instance_and_process(storage: Storage, location: str) -> None:
    storage.write("a", b"content")
    assert storage.location == location
    assert storage.full_path("x/y") == f"{location}/x/y"
    assert Storage(f"{location}/").location == location
    assert Storage(storage.location).read("a") == pickle.loads(pickle.dumps(storage)).read("a") == b"content"


def test_written_content_is_read_back_and_replaced(storage: Storage) -> None:
    storage.write("anabranch/deep/file", b"one")
    storage.write("anabranch/deep/file", pa.py_buffer(b"two"))
    assert storage.read("anabranch/deep/file") == b"two"
    assert everything_below(storage) == {"anabranch/deep/file"}


@pytest.mark.parametrize("name", ["plain", "a%20b", "a b", "ä*?[1]{x}#", "epoch=000000000012", "%2E", "a&b+c;d"])
def test_names_are_taken_as_they_are(storage: Storage, name: str) -> None:
    storage.write(f"x/{name}/{name}", name.encode())
    assert storage.list_names(f"x/{name}") == [name]
    assert everything_below(storage) == {f"x/{name}/{name}"}
    assert storage.read(f"x/{name}/{name}") == name.encode()
    storage.delete(f"x/{name}/{name}")
    assert everything_below(storage) == set()


def test_a_missing_file_is_none_or_an_error_that_names_it(storage: Storage) -> None:
    assert storage.read_if_present("anabranch/nothing") is None
    for read in (storage.read, storage.open, lambda path: storage.copy_to(path, storage, "x")):
        with pytest.raises(CheckpointError, match=r"anabranch/nothing is missing\. Restore"):
            read("anabranch/nothing")
    assert everything_below(storage) == set()


@pytest.mark.parametrize("content", [b"", b"small", LARGE], ids=["empty", "small", "large"])
def test_an_open_file_can_be_read_from_anywhere(storage: Storage, content: bytes) -> None:
    storage.write("file", content)
    with storage.open("file") as file:
        assert (file.size(), file.seekable()) == (len(content), True)
        file.seek(len(content) // 2)
        assert file.read(5) == content[len(content) // 2 :][:5]
        file.seek(0)
        assert file.read_buffer().to_pybytes() == content


def test_an_open_file_is_read_as_parquet_in_part(storage: Storage) -> None:
    table = pa.table({"n": pa.array(range(400_000)), "other": pa.array(range(400_000))})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=100_000, compression="none", use_dictionary=False)
    storage.write("file.parquet", sink.getvalue())
    with storage.open("file.parquet") as file:
        assert pq.ParquetFile(file).read_row_group(2, columns=["n"]).equals(table.select(["n"]).slice(200_000, 100_000))


def test_creation_happens_once(storage: Storage) -> None:
    assert storage.create("anabranch/file", b"first")
    assert not storage.create("anabranch/file", pa.py_buffer(b"second"))
    assert not Storage(storage.location).create("anabranch/file", b"first")
    assert storage.read("anabranch/file") == b"first"
    assert everything_below(storage) == {"anabranch/file"}


def test_of_many_creators_at_once_exactly_one_succeeds_and_its_content_stays(storage: Storage) -> None:
    start = threading.Barrier(8)
    created: list[int] = []

    def race(number: int) -> None:
        start.wait()
        if storage.create("anabranch/file", str(number).encode()):
            created.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in created] == [storage.read("anabranch/file")]
    assert everything_below(storage) == {"anabranch/file"}


def test_listing_shows_files_only_sorted_and_without_hidden_ones(storage: Storage) -> None:
    for name in ["b", "a", ".hidden", "folder/c", "bc/d"]:
        storage.write(f"x/{name}", b"")
    assert storage.list_names("x") == ["a", "b"]
    assert storage.list_names("nowhere") == []


def test_a_listing_shows_at_once_what_another_wrote_or_deleted(storage: Storage) -> None:
    other = Storage(storage.location)
    assert storage.list_names("x") == []
    other.write("x/a", b"")
    assert storage.list_names("x") == ["a"]
    other.write("x/b", b"")
    assert (storage.list_names("x"), storage.read_if_present("x/b")) == (["a", "b"], b"")
    other.delete("x/a")
    assert (storage.list_names("x"), storage.read_if_present("x/a")) == (["b"], None)
    assert everything_below(storage) == {"x/b"}


def test_walking_shows_every_file_below_a_folder_with_size_and_time(storage: Storage) -> None:
    before = time.time()
    for path in ["x/b", "x/.b.123.tmp", "x/deep/er/c", "xy/d"]:
        storage.write(path, path.encode())
    found = {path: (size, modified) for path, size, modified in storage.walk("x")}
    assert {path: size for path, (size, _) in found.items()} == {"x/b": 3, "x/.b.123.tmp": 12, "x/deep/er/c": 11}
    # Object stores keep whole seconds.
    assert all(before - 1.5 <= modified <= time.time() + 1.5 for _, modified in found.values())
    assert everything_below(storage) == {*found, "xy/d"}
    assert list(storage.walk("nowhere")) == []


def test_deleting_is_done_once_and_harmless_twice(storage: Storage) -> None:
    storage.write("x/a", b"")
    storage.delete("x/a")
    storage.delete("x/a")
    storage.delete("nowhere/a")
    assert storage.list_names("x") == []


@pytest.mark.parametrize("path", ["/etc/passwd", "anabranch/../../x", "a\0b"])
def test_paths_that_lead_out_of_the_checkpoint_are_refused(storage: Storage, path: str) -> None:
    storage.write("inside", b"")
    for use in (
        storage.read,
        storage.open,
        storage.delete,
        storage.walk,
        storage.list_names,
        lambda path: storage.copy_to("inside", storage, path),
        lambda path: storage.copy_to(path, storage, "inside"),
    ):
        with pytest.raises(CheckpointError, match="not a path inside the checkpoint"):
            use(path)


@pytest.mark.parametrize("kind", ["local", "s3", "moved"])
@pytest.mark.parametrize("content", [b"", b"small", LARGE], ids=["empty", "small", "large"])
def test_copies_arrive_whole_wherever_they_go(
    storage: Storage, kind: str, content: bytes, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    other = Storage(new_location(kind, request, tmp_path / "other"))
    storage.write("x/file", content)
    other.write("copy/of/file", b"old")
    storage.copy_to("x/file", other, "copy/of/file")
    assert other.read("copy/of/file") == content
    assert everything_below(other) == {"copy/of/file"}
    assert everything_below(storage) == {"x/file"}


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_a_file_copied_to_itself_stays_as_it_is(storage: Storage, content: bytes) -> None:
    storage.write("x/file", content)
    storage.copy_to("x/file", storage, "x/file")
    assert storage.read("x/file") == content


class Broken(Storage):
    """Its files end before they are complete."""

    def _chunks(self, source: Any, path: str) -> Iterator[bytes]:
        yield from super()._chunks(source, path)
        raise CheckpointError(f"{path} cannot be read any further")


def test_a_copy_that_fails_half_way_leaves_the_old_content_and_nothing_else(storage: Storage, tmp_path: Path) -> None:
    broken = Broken(str(tmp_path / "broken"))
    broken.write("large", LARGE)
    broken.write("small", b"small")
    storage.write("file", b"old")
    for path in ("small", "large"):
        with pytest.raises(CheckpointError, match="cannot be read any further"):
            broken.copy_to(path, storage, "file")
        with pytest.raises(CheckpointError, match="cannot be read any further"):
            broken.copy_to(path, storage, "new")
    assert storage.read("file") == b"old"
    assert everything_below(storage) == {"file"}


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_any_sequence_of_operations_leaves_what_a_dictionary_would_hold(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root = new_location(kind, request, tmp_path)
    paths = st.sampled_from(["a", "x/a", "x/b", "x/y/a", ".hidden"])
    operation = st.tuples(st.sampled_from(["write", "create", "delete", "copy"]), paths, paths, st.binary(max_size=3))
    rounds = iter(range(10_000))

    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(operation, max_size=12))
    def compare(operations: list[tuple[str, str, str, bytes]]) -> None:
        storage, model = Storage(f"{root}/{next(rounds)}", durable=False), dict[str, bytes]()
        for call, path, target, content in operations:
            if call == "write":
                storage.write(path, content)
                model[path] = content
            elif call == "create":
                assert storage.create(path, content) == (path not in model)
                model.setdefault(path, content)
            elif call == "delete":
                storage.delete(path)
                model.pop(path, None)
            elif path in model:
                storage.copy_to(path, storage, target)
                model[target] = model[path]
        assert {path: (size, storage.read(path)) for path, size, _ in storage.walk("")} == {
            path: (len(content), content) for path, content in model.items()
        }
        assert storage.list_names("x") == sorted(path[2:] for path in model if path in ("x/a", "x/b"))

    compare()
