"""Which URLs can be checkpoints, and what the errors of drivers mean; nothing here is asked of a store."""

import sys
from pathlib import Path

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)
from hypothesis import given
from hypothesis import strategies as st
from s3fs.errors import translate_boto_error

from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.storage.drivers import is_conflict, is_taken, is_unsupported, place_of, refusal
from anabranch.core.errors import CheckpointError


@pytest.mark.parametrize(
    ("location", "normal"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3A://bucket/a//b/./c/", "s3a://bucket/a/b/c"),
        ("s3a://bucket/a%20b c", "s3a://bucket/a%20b c"),
    ],
)
def test_urls_of_buckets_have_one_normal_form(location: str, normal: str) -> None:
    assert Storage(location).location == normal
    assert Storage(normal).location == normal


@given(st.lists(st.text(st.characters(exclude_characters="/?\0:", exclude_categories=["Cs"]), min_size=1), max_size=4))
def test_a_normal_form_stays_as_it_is(parts: list[str]) -> None:
    location = "/".join(["s3://bucket", *parts])
    if ".." in parts:
        with pytest.raises(CheckpointError, match="not the URL of a folder"):
            place_of(location)
    else:
        normal = place_of(location)
        assert place_of(normal.url) == normal


@pytest.mark.parametrize(
    "location",
    ["s3:bucket/x", "s3:/bucket/x", "s3:///x", "s3://", "s3://b/../x", "s3://b/x?versionId=1", "s3://b/a::b"],
)
def test_urls_that_name_no_folder_of_a_bucket_are_refused_with_an_example(location: str) -> None:
    with pytest.raises(CheckpointError, match=r"Write it as s3://bucket/path/to/checkpoint"):
        Storage(location)


@pytest.mark.parametrize("location", ["s3://key:secret@bucket/x", "sftp://me:secret@host/x", "nonsense://a:secret@b"])
def test_a_password_in_a_location_is_refused_and_not_repeated(location: str) -> None:
    with pytest.raises(CheckpointError, match="Take it out, and set the credentials in the environment") as refused:
        Storage(location)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("location", ["nonsense://host/c", "memory://c", "http://host/c", "C:/checkpoint"])
def test_schemes_that_cannot_hold_a_checkpoint_are_refused_with_the_advice_to_use_others(location: str) -> None:
    with pytest.raises(CheckpointError, match=r"are not supported.*Use S3.*or a local or mounted path"):
        Storage(location)


def test_a_file_system_that_cannot_create_exclusively_is_refused_when_it_is_to(tmp_path: Path) -> None:
    storage = Storage(f"local://{tmp_path}")
    storage.write("file", b"content")
    with pytest.raises(CheckpointError, match=r"two drivers could run on one checkpoint and not notice\. Use S3"):
        storage.create("new", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("location", "module", "package"),
    [
        ("s3://bucket/c", "s3fs", r"anabranch\[s3\]"),
        ("s3a://bucket/c", "s3fs", r"anabranch\[s3\]"),
        ("gs://bucket/c", "gcsfs", "gcsfs"),
        ("abfss://container@account.dfs.core.windows.net/c", "adlfs", "adlfs"),
        ("oss://bucket/c", "ossfs", "ossfs"),
        ("sftp://host/c", "paramiko", "paramiko"),
    ],
)
def test_a_missing_driver_is_an_error_that_names_the_package(
    location: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    loaded = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(loaded, location.partition(":")[0], raising=False)
    with pytest.raises(CheckpointError, match=f"Install it.*{package}"):
        Storage(location)


def answer(code: str, status: int, operation: str = "PutObject") -> Exception:
    """An error of S3, as its driver passes it on."""
    response = {"Error": {"Code": code, "Message": "by key AKIA"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(response, operation))


ENDPOINT = "http://user:secret@host:9000/bucket"


@pytest.mark.parametrize(
    ("error", "reason", "advice"),
    [
        (NoCredentialsError(), "no credentials", "AWS_ACCESS_KEY_ID"),
        (answer("InvalidAccessKeyId", 403), "credentials are not accepted", "Renew"),
        (answer("ExpiredToken", 400), "credentials are not accepted", "Renew"),
        (answer("AccessDenied", 403), "access is denied", "s3:PutObject"),
        (answer("403", 403, "HeadObject"), "access is denied", "s3:GetObject"),
        (answer("NoSuchBucket", 404), "no such bucket", "Create it"),
        (answer("PermanentRedirect", 301), "another region", "AWS_DEFAULT_REGION"),
        (answer("RequestTimeTooSkewed", 403), "clock", "Set it right"),
        (answer("SlowDown", 503), "overloaded", "again in a while"),
        (EndpointConnectionError(endpoint_url=ENDPOINT), "cannot be reached", "AWS_ENDPOINT_URL"),
        (ConnectTimeoutError(endpoint_url=ENDPOINT), "no answer in time", "AWS_ENDPOINT_URL"),
        (ReadTimeoutError(endpoint_url=ENDPOINT), "no answer in time", "AWS_ENDPOINT_URL"),
        (TimeoutError(), "no answer in time", "network"),
        (answer("Strange", 418), "failed", "Check the store"),
        (KeyError("AKIA"), "the store failed", "Check the store"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else None,
)
def test_errors_of_drivers_say_what_to_do_and_nothing_of_endpoints_and_keys(
    error: Exception, reason: str, advice: str
) -> None:
    said = str(refusal(place_of("s3://bucket/c"), "write", "s3://bucket/c/file", error))
    assert said.startswith("Cannot write s3://bucket/c/file: ")
    assert reason in said
    assert advice in said
    assert "host" not in said
    assert "secret" not in said
    assert "AKIA" not in said


def test_what_a_conditional_write_is_answered_is_told_apart() -> None:
    errors = {
        "taken": answer("PreconditionFailed", 412),
        "conflict": answer("ConditionalRequestConflict", 409),
        "unsupported": answer("NotImplemented", 501),
        "denied": answer("AccessDenied", 403),
    }
    told = {name: (is_taken(e), is_conflict(e), is_unsupported(e)) for name, e in errors.items()}
    assert told == {
        "taken": (True, False, False),
        "conflict": (False, True, False),
        "unsupported": (False, False, True),
        "denied": (False, False, False),
    }
