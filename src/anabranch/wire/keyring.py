"""Where programs of one user find the tokens of that user's jobs on this machine: files that nobody else can read.

The system tells nobody who is behind a TCP connection, but it does keep files from other users. So a job writes its
token into a file of its user's, and whoever can read that is the same user.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import stat
import tempfile
import urllib.parse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from anabranch.core.errors import SettingsError
from anabranch.wire.credentials import Credentials, is_loopback_host

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 32
#: A process's start is not told to the second.
_BEGIN_TOLERANCE_S = 10.0
_FILE_BYTES_MAX = 1 << 16


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


@dataclass(frozen=True)
class Entry:
    """A running job of this user on this machine, and what it takes to control it."""

    #: Where its HTTP API listens, and by which scheme it is spoken to.
    scheme: str
    host: str
    port: int
    credentials: Credentials

    @property
    def listens_everywhere(self) -> bool:
        return ipaddress.ip_address(self.host).is_unspecified

    @property
    def url(self) -> str:
        """Where the job itself is, and nobody who merely goes by the same name."""
        address = ipaddress.ip_address(self.host)
        if self.listens_everywhere:
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
        return f"{self.scheme}://{f'[{address}]' if address.version == 6 else address}:{self.port}"


class Announcement:
    """The file of a running job. It is gone after `remove`."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def remove(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)


def announce(entry: Entry) -> Announcement:
    """Let this user's other programs know a job. Without a place for that, a warning says so, and the job runs."""
    process = psutil.Process()
    document = {**asdict(entry), "pid": process.pid, "began": process.create_time()}
    for folder in _folders():
        try:
            _make_private(folder)
            _forget_ended(folder)
            path = folder / f"job-{_machine()}-{entry.port}.json"
            _write(path, json.dumps(document).encode())
        except (OSError, SettingsError) as error:
            logger.debug("the token is not kept in %s: %s", folder, error)
        else:
            return Announcement(path)
    logger.warning(
        "the job's token cannot be kept in a file that only its user can read: commands about the job need --token"
    )
    return Announcement(None)


def find(url: str) -> Entry | None:
    """The job of this user on this machine that has its HTTP API at a URL or host:port."""
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    for folder in _folders():
        document = _read(folder / f"job-{_machine()}-{port}.json")
        if document is None or not _is_running(document):
            continue
        with contextlib.suppress(KeyError, TypeError, ValueError):
            entry = Entry(**{**_fields_of(document), "credentials": Credentials(**document["credentials"])})
            if _is_this_machine(host, entry.host):
                return entry
    return None


def is_own_name(host: str) -> bool:
    """Whether this machine calls itself so."""
    own = socket.gethostname().lower()
    return host.lower() in (own, own.partition(".")[0])


def user_token() -> str:
    """A token that all programs of this user share, made when it is first asked for."""
    for folder in _folders():
        path = folder / "token.json"
        with contextlib.suppress(OSError, SettingsError):
            _make_private(folder)
            content = json.dumps({"token": new_token()}).encode()
            if _read(path) is None:
                with contextlib.suppress(FileExistsError):  # another program was faster, or the file is of no use
                    _write(path, content, replace=False)
            if _read(path) is None:
                _write(path, content)
            if document := _read(path):
                return str(document["token"])
    raise SettingsError(
        "There is no place for a token that only this user can read: neither the home directory nor the temporary one "
        "can be written. Set anabranch.token, and ANABRANCH_TOKEN for workers."
    )


def _folders() -> Iterator[Path]:
    """Where files are looked for: the home directory, and what takes its place for users that have none."""
    with contextlib.suppress(RuntimeError):
        yield Path.home() / ".anabranch"
    yield Path(tempfile.gettempdir()) / f"anabranch-{os.geteuid()}"


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SettingsError(f"{folder} belongs to somebody else. Remove it.")
    if found.st_mode & 0o077:
        folder.chmod(0o700)


def _write(path: Path, content: bytes, *, replace: bool = True) -> None:
    """All of the content, or nothing of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
        if replace:
            temporary.replace(path)
        else:
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    """What a file says, if only this user can have written or read it."""
    try:
        folder = path.parent.lstat()
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as stream:
            found = os.fstat(file)
            content = stream.read(_FILE_BYTES_MAX)
        document = json.loads(content)
    except (OSError, ValueError):
        return None
    for each in (folder, found):
        if each.st_uid != os.geteuid() or each.st_mode & 0o077:
            logger.warning("%s is not used, because others than its user can get at it: remove it", path)
            return None
    return document if isinstance(document, dict) else None


def _forget_ended(folder: Path) -> None:
    """Remove what killed drivers have left behind on this machine."""
    for path in folder.glob(f"job-{_machine()}-*.json"):
        document = _read(path)
        if document is not None and not _is_running(document):
            path.unlink(missing_ok=True)


def _is_running(document: dict[str, Any]) -> bool:
    """Whether the process that wrote it still runs: it keeps others from its port."""
    try:
        began = psutil.Process(document["pid"]).create_time()
        return bool(abs(began - document["began"]) < _BEGIN_TOLERANCE_S)
    except (KeyError, TypeError, ValueError, psutil.Error):
        return False


def _fields_of(document: dict[str, Any]) -> dict[str, Any]:
    scheme, host, port = document["scheme"], document["host"], document["port"]
    if scheme not in ("http", "https") or not isinstance(port, int):
        raise ValueError(scheme)
    ipaddress.ip_address(host)
    return {"scheme": scheme, "host": host, "port": port}


def _is_this_machine(asked: str, listens_on: str) -> bool:
    return asked == listens_on or is_loopback_host(asked) or is_own_name(asked)


def _machine() -> str:
    """The home directory may be shared by several machines."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
