"""Checkpoints in a bucket of a real S3 server, over HTTP: who creates, what is asked, and what goes wrong."""

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from s3fs import S3FileSystem

from anabranch.checkpoint.generations import claim_generation, latest_generation
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from support.s3_server import ACCESS_KEY, SECRET_KEY, Application, S3Server, refusal, running_s3


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr(server, "meddler", None)
    yield server
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def storage(s3: S3Server) -> Storage:
    storage = Storage(f"{s3.new_bucket()}/checkpoint")
    s3.requests.clear()
    return storage


def names_asked(s3: S3Server, method: str) -> list[str]:
    return [path.rpartition("/")[2] for verb, path, _, _ in s3.requests if verb == method]


def test_creating_is_a_conditional_write_and_writing_is_not(storage: Storage, s3: S3Server) -> None:
    assert storage.create("a", b"1")
    storage.write("b", b"1")
    conditions = {path.rpartition("/")[2]: condition for verb, path, condition, _ in s3.requests if verb == "PUT"}
    assert (conditions["a"], conditions["b"]) == ("*", None)


def test_the_store_is_tried_once_and_then_each_operation_is_one_request(storage: Storage, s3: S3Server) -> None:
    assert storage.create("a", b"1")
    assert [verb for verb, *_ in s3.requests] == ["PUT", "PUT", "HEAD", "DELETE", "PUT"]
    s3.requests.clear()
    assert storage.create("b", b"1")
    storage.write("c", b"1")
    assert storage.read("a") == b"1"
    assert storage.read_if_present("nothing") is None
    assert storage.open("a").read() == b"1"
    assert storage.list_names("") == ["a", "b", "c"]
    storage.delete("c")
    assert [verb for verb, *_ in s3.requests] == ["PUT", "PUT", "GET", "GET", "GET", "GET", "DELETE"]


def test_of_many_threads_with_storages_of_their_own_one_wins_each_race(storage: Storage) -> None:
    racers = 8
    start = threading.Barrier(racers)

    def race(_: int) -> list[bool]:
        own = Storage(storage.location)
        start.wait()
        # The same content for all: nobody may take another's file for its own.
        return [own.create(f"race/{name}", b"same") for name in range(5)]

    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(race, range(racers)))
    assert [sum(each) for each in zip(*won, strict=True)] == [1] * 5
    assert storage.list_names("race") == [str(name) for name in range(5)]


def test_processes_at_once_claim_different_generations(storage: Storage) -> None:
    claim = "import sys; from anabranch.checkpoint.generations import claim_generation as claim\n"
    claim += "from anabranch.checkpoint.storage import Storage\n"
    claim += "sys.stdin.read(); print(claim(Storage(sys.argv[1]), {}))"
    command = [sys.executable, "-c", claim, storage.location]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    owned = sorted(int(process.stdout.read()) for process in processes if process.stdout)
    assert [process.wait() for process in processes] == [0] * 3
    assert owned == list(range(owned[0], owned[0] + 3))
    assert latest_generation(storage) == owned[-1]
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()


def test_creation_succeeds_when_only_the_answer_to_it_was_lost(storage: Storage, s3: S3Server) -> None:
    lost: list[str] = []

    def lose_one(request: dict[str, Any], begin: Any, buckets: Application) -> Iterable[bytes]:
        if request["REQUEST_METHOD"] == "PUT" and request["PATH_INFO"].endswith("/file") and not lost:
            lost.append(request["PATH_INFO"])
            list(buckets(request, lambda *_: None))
            return refusal(begin, "500 Internal Server Error", "InternalError")
        return buckets(request, begin)

    s3.meddler = lose_one
    assert storage.create("file", b"mine")
    assert lost
    assert names_asked(s3, "PUT").count("file") == 2
    assert not storage.create("file", b"mine")


def test_creation_waits_for_a_conflicting_one_to_be_decided(storage: Storage, s3: S3Server) -> None:
    conflicts = iter(range(2))

    def conflict_twice(request: dict[str, Any], begin: Any, buckets: Application) -> Iterable[bytes]:
        if request["PATH_INFO"].endswith("/file") and next(conflicts, None) is not None:
            return refusal(begin, "409 Conflict", "ConditionalRequestConflict")
        return buckets(request, begin)

    s3.meddler = conflict_twice
    assert storage.create("file", b"mine")
    assert names_asked(s3, "PUT").count("file") == 3


def test_a_failed_condition_is_understood_without_its_name(storage: Storage, s3: S3Server) -> None:
    """MinIO and others leave out which condition failed."""
    storage.write("file", b"theirs")

    def terse(request: dict[str, Any], begin: Any, buckets: Application) -> Iterable[bytes]:
        if request["PATH_INFO"].endswith("/file") and request.get("HTTP_IF_NONE_MATCH"):
            return refusal(begin, "412 Precondition Failed", "PreconditionFailed")
        return buckets(request, begin)

    s3.meddler = terse
    assert not storage.create("file", b"mine")


def without_conditions(request: dict[str, Any], begin: Any, buckets: Application) -> Iterable[bytes]:
    request.pop("HTTP_IF_NONE_MATCH", None)
    return buckets(request, begin)


def not_implemented(request: dict[str, Any], begin: Any, buckets: Application) -> Iterable[bytes]:
    if request.get("HTTP_IF_NONE_MATCH"):
        return refusal(begin, "501 Not Implemented", "NotImplemented")
    return buckets(request, begin)


@pytest.mark.parametrize("store", [without_conditions, not_implemented])
def test_a_store_that_knows_no_conditions_is_refused_at_the_first_creation(
    storage: Storage, s3: S3Server, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()
    s3.meddler = store
    with pytest.raises(CheckpointError, match=r"two drivers could run on one checkpoint and not notice\. Use S3"):
        storage.create("file", b"mine")
    assert storage.read_if_present("file") is None
    assert list(storage.walk("")) == []


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_does_not_exist_is_an_error_everywhere() -> None:
    storage = Storage("s3://no-such-bucket/checkpoint")
    for use in (
        lambda: storage.read_if_present("x"),
        lambda: storage.open("x"),
        lambda: storage.write("x", b""),
        lambda: storage.create("x", b""),
        lambda: storage.list_names("x"),
        lambda: list(storage.walk("x")),
        lambda: storage.delete("x"),
    ):
        with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/checkpoint.*no such bucket.*Create it"):
            use()


def test_denied_access_is_an_error_that_says_what_to_allow(storage: Storage, s3: S3Server) -> None:
    s3.meddler = lambda _, begin, __: refusal(begin, "403 Forbidden", "AccessDenied")
    for use in (lambda: storage.read_if_present("x"), lambda: storage.write("x", b""), lambda: storage.list_names("x")):
        with pytest.raises(CheckpointError, match=r"s3://.*access is denied.*s3:ListBucket, s3:GetObject"):
            use()


def test_missing_credentials_are_an_error_that_says_where_to_set_them(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=rf"{storage.location}/x: there are no credentials.*AWS_ACCESS_KEY_ID"):
        storage.read("x")


def test_a_store_that_is_not_there_is_an_error_that_says_what_to_check(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"cannot be reached.*AWS_ENDPOINT_URL") as refused:
        storage.read("x")
    assert str(port) not in str(refused.value)


def test_a_store_that_does_not_answer_is_an_error_and_not_a_standstill(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setattr(S3FileSystem, "read_timeout", 0.2)
        monkeypatch.setattr(S3FileSystem, "retries", 2)
        S3FileSystem.clear_instance_cache()
        with pytest.raises(CheckpointError, match=rf"{storage.location}/x: no answer in time.*Check the network"):
            storage.read("x")


def test_a_large_file_is_read_where_it_is_wanted_and_its_errors_say_what_to_do(storage: Storage, s3: S3Server) -> None:
    content = bytes(range(256)) * (12 * 2**20 // 256)
    storage.write("large", content)
    s3.requests.clear()
    with storage.open("large") as file:
        file.seek(len(content) - 10)
        assert file.read() == content[-10:]
        ranges = [part for verb, _, _, part in s3.requests if verb == "GET"]
        assert ranges == ["bytes=0-1048575", f"bytes={len(content) - 10}-{len(content) - 1}"]
        s3.meddler = lambda _, begin, __: refusal(begin, "403 Forbidden", "AccessDenied")
        file.seek(0)
        with pytest.raises(CheckpointError, match=rf"Cannot read {storage.location}/large: access is denied"):
            file.read(10)


def test_copies_inside_the_store_move_no_content_through_this_process(storage: Storage, s3: S3Server) -> None:
    other = Storage(f"{s3.new_bucket()}/savepoint")
    storage.write("x", b"content")
    s3.requests.clear()
    storage.copy_to("x", other, "y")
    assert [verb for verb, *_ in s3.requests] == ["HEAD", "PUT"]
    assert other.read("y") == b"content"


def test_an_interrupted_copy_leaves_no_parts_to_pay_for(storage: Storage, s3: S3Server, tmp_path: Any) -> None:
    source = Storage(str(tmp_path))
    source.write("large", bytes(40 * 2**20))
    parts = iter(range(100))

    def full(request: dict[str, Any], begin: Any, buckets: Application) -> Iterable[bytes]:
        if request["REQUEST_METHOD"] == "PUT" and next(parts) == 1:
            return refusal(begin, "403 Forbidden", "AccessDenied")
        return buckets(request, begin)

    s3.meddler = full
    with pytest.raises(CheckpointError, match="access is denied"):
        source.copy_to("large", storage, "large")
    s3.meddler = None
    assert storage.read_if_present("large") is None
    assert S3FileSystem().list_multipart_uploads(storage.location.split("/")[2]) == []


def test_folders_that_spark_marked_with_empty_objects_are_no_files(storage: Storage) -> None:
    bucket = storage.location.split("/")[2]
    storage.write("commits/0", b"")
    for key in ("checkpoint/commits/", "checkpoint/commits/deeper/"):
        S3FileSystem().call_s3("put_object", Bucket=bucket, Key=key, Body=b"")
    assert storage.list_names("commits") == ["0"]
    assert [path for path, _, _ in storage.walk("")] == ["commits/0"]


def test_a_listing_of_many_pages_is_complete(storage: Storage, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "5")
    names = [f"{number:02d}" for number in range(12)]
    for name in names:
        storage.write(f"many/{name}", b"")
    s3.requests.clear()
    assert storage.list_names("many") == names
    assert [verb for verb, *_ in s3.requests] == ["GET"] * 3
    assert [path for path, _, _ in storage.walk("many")] == [f"many/{name}" for name in names]


def test_parent_and_forked_child_both_go_on(storage: Storage) -> None:
    forking = """
import os, sys, time
from anabranch.checkpoint.storage import Storage
storage = Storage(sys.argv[1])
storage.write("parent", b"1")
child = os.fork()
if child == 0:
    start = time.monotonic()
    storage.write("child", storage.read("parent") + b"2")
    os._exit(0 if time.monotonic() - start < 5 else 3)
assert os.waitpid(child, 0)[1] == 0
storage.write("both", storage.read("child") + b"3")
"""
    subprocess.run([sys.executable, "-c", forking, storage.location], check=True, timeout=60)
    assert storage.read("both") == b"123"


def test_nothing_of_credentials_and_endpoints_is_in_the_checkpoint_or_in_pickles(
    storage: Storage, s3: S3Server
) -> None:
    claim_generation(storage, {"host": "here"})
    storage.write("x", pa.py_buffer(b"content"))
    kept = b"".join(storage.read(path) for path, _, _ in storage.walk(""))
    kept += storage.location.encode() + pickle.dumps(storage)
    for secret in (ACCESS_KEY, SECRET_KEY, s3.endpoint, str(s3.port), os.environ["AWS_SECRET_ACCESS_KEY"]):
        assert secret.encode() not in kept
