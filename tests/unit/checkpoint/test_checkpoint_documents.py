import json
from pathlib import Path

import pytest

from anabranch.checkpoint.documents import FORMAT_VERSION, decode, encode
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError

CONTENT = {"name": "größe", "numbers": [1, 2], "nothing": None}


@pytest.fixture
def storage() -> Storage:
    return Storage("/checkpoint")


def test_a_document_comes_back_with_the_version_of_its_format(storage: Storage) -> None:
    assert decode(storage, "x", encode(CONTENT)) == {**CONTENT, "format_version": FORMAT_VERSION}


def test_every_truncation_is_noticed(storage: Storage) -> None:
    raw = encode(CONTENT).rstrip()
    for length in range(len(raw)):
        with pytest.raises(CheckpointError, match=r"/checkpoint/a/x\.json is damaged: .*Restore it"):
            decode(storage, "a/x.json", raw[:length])


def test_altered_content_is_noticed(storage: Storage) -> None:
    raw = encode(CONTENT).replace(b"2", b"3")
    with pytest.raises(CheckpointError, match="checksum does not match"):
        decode(storage, "x", raw)


@pytest.mark.parametrize("raw", [b"[]", b"3", b"{}", b'{"content": 1}', b'{"content": {}}', b"\xff\xfe"])
def test_other_files_are_not_taken_for_documents(storage: Storage, raw: bytes) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        decode(storage, "x", raw)


def test_a_newer_format_asks_for_an_upgrade_whatever_else_it_holds(storage: Storage) -> None:
    raw = json.dumps({"format_version": FORMAT_VERSION + 1, "content": {}}).encode()
    with pytest.raises(CheckpointError, match=rf"format {FORMAT_VERSION + 1}.*Upgrade Anabranch"):
        decode(storage, "x", raw)


def test_the_file_is_named_in_full(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path / "deep" / "x.json")):
        decode(Storage(str(tmp_path)), "deep/x.json", b"")
