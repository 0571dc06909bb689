"""JSON documents that know when they are damaged: each carries the version of the format and a checksum of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import xxhash

from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError

_T = TypeVar("_T")

#: Of the checkpoint as a whole. A larger number in a file means that a newer Anabranch wrote it.
FORMAT_VERSION = 1


def checksum_of(content: bytes | pa.Buffer) -> str:
    """Tells damaged content from intact content; the prefix names the algorithm."""
    return f"xxh3:{xxhash.xxh3_64_hexdigest(content)}"


class Checksum:
    """The checksum of content that comes in chunks."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, chunk: bytes) -> None:
        self._hash.update(chunk)

    @property
    def text(self) -> str:
        return f"xxh3:{self._hash.hexdigest()}"


def encode(content: Mapping[str, Any], *, format_version: int = FORMAT_VERSION) -> bytes:
    """Returns the text of a document."""
    document = {
        "format_version": format_version,
        "checksum": _document_checksum(format_version, content),
        "content": content,
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def decode(storage: Storage, path: str, raw: bytes) -> dict[str, Any]:
    """Returns the content of the document that was read from ``path``, with the ``format_version`` added to it."""
    where = storage.full_path(path)
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise _damaged(where, "it is not complete, or not JSON") from error
    if not isinstance(document, dict) or not isinstance(document.get("content"), dict):
        raise _damaged(where, "it is not a document of Anabranch")
    version, content = document.get("format_version"), document["content"]
    if not isinstance(version, int):
        raise _damaged(where, "it has no format version")
    # Before the checksum: what a newer format means by it is unknown.
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where} was written by a newer Anabranch (checkpoint format {version}; this one reads formats up to "
            f"{FORMAT_VERSION}). Upgrade Anabranch here, or use a new checkpoint."
        )
    if document.get("checksum") != _document_checksum(version, content):
        raise _damaged(where, "its checksum does not match its content")
    return {**content, "format_version": version}


def write(storage: Storage, path: str, value: Any) -> None:
    """Writes a value with fields, among them its ``format_version``, as a document."""
    content = msgspec.to_builtins(value)
    version = content.pop("format_version")
    storage.write(path, encode(content, format_version=version))


def read(storage: Storage, path: str, kind: type[_T]) -> _T:
    """Reads a document as a value of a kind that has a ``format_version`` among its fields."""
    return convert(storage, path, decode(storage, path, storage.read(path)), kind)


def convert(storage: Storage, path: str, content: Mapping[str, Any], kind: type[_T]) -> _T:
    """Turns the content of a document into a value of a kind; what only the content has is left out."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise unexpected(storage, path, error) from error


def unexpected(storage: Storage, path: str, reason: object) -> CheckpointError:
    """Returns the error for a document that is intact, but whose content is not what its place says."""
    return _damaged(storage.full_path(path), f"its content is not as expected ({reason})")


def _document_checksum(format_version: int, content: Mapping[str, Any]) -> str:
    canonical = json.dumps([format_version, content], sort_keys=True, separators=(",", ":"))
    return checksum_of(canonical.encode())


def _damaged(where: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is damaged: {reason}. Restore it from a copy of the checkpoint, or use a new checkpoint."
    )
