"""Which fsspec drivers a checkpoint can trust, and what their many kinds of errors mean.

A checkpoint needs two things that not every file system does: to replace a file in one step, and to create a file only
if it does not exist, decided by the store itself. Object stores do the first with every write, and the second with
conditional writes. Drivers that only look first and write then are of no use: two drivers would both succeed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

import fsspec
from fsspec.registry import known_implementations
from fsspec.spec import AbstractFileSystem

from anabranch.core.errors import CheckpointError

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^/]*)(?P<path>/.*)?", re.DOTALL)

_USABLE = "Use S3, Google Cloud Storage, Azure Storage, or a local or mounted path that the driver and all workers see."


@dataclass(frozen=True)
class ObjectStore:
    """What is special about the driver of an object store whose conditional writes are known to be conditional."""

    #: What to install for it, in the words of pip.
    package: str
    #: The arguments that make reading a whole file one request.
    read_whole: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    #: The argument that attaches user-defined metadata to a new file, if ``metadata()`` gives them back.
    metadata_argument: str | None = None
    #: Whether it copies files by itself, and has done so when the call returns.
    copies: bool = False


_S3 = ObjectStore("anabranch[s3]", MappingProxyType({"max_concurrency": 1}), metadata_argument="Metadata", copies=True)
_GOOGLE = ObjectStore("gcsfs", copies=True)
_AZURE = ObjectStore("adlfs")

_OBJECT_STORES = MappingProxyType(
    {"s3": _S3, "s3a": _S3, "gs": _GOOGLE, "gcs": _GOOGLE, "abfs": _AZURE, "abfss": _AZURE, "az": _AZURE}
)


@dataclass(frozen=True)
class StoreLocation:
    """A location that was checked: its URL in normal form, and what is known about the store behind it."""

    url: str
    scheme: str

    @property
    def store(self) -> ObjectStore | None:
        """None: a file system of another kind, which replaces files by moving others over them."""
        return _OBJECT_STORES.get(self.scheme)


def place_of(location: str) -> StoreLocation:
    """Returns what a URL stands for; refuses one that cannot be a checkpoint. Asks nothing of the store yet."""
    url = _URL.fullmatch(location)
    if url is not None and ":" in url["host"].rpartition("@")[0]:
        raise CheckpointError(
            "The checkpoint location has a password in it, and locations are written to files and logs. Take it out, "
            "and set the credentials in the environment of the driver and of all workers."
        )
    scheme = location.partition(":")[0].lower()
    store = _OBJECT_STORES.get(scheme)
    _check_driver(scheme, store, location)
    parts = PurePosixPath((url and url["path"]) or "/").parts[1:]
    if url is None or "?" in location or "::" in location or ".." in parts or not (url["host"] or store is None):
        name = "bucket/path" if store else "host/path"
        raise CheckpointError(f"{location} is not the URL of a folder. Write it as {scheme}://{name}/to/checkpoint.")
    return StoreLocation("/".join([f"{scheme}://{url['host']}", *parts]), scheme)


def _check_driver(scheme: str, store: ObjectStore | None, location: str) -> None:
    try:
        driver = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        module = str(known_implementations.get(scheme, {}).get("class", "")).partition(".")[0]
        package = store.package if store else module
        if not package:
            raise CheckpointError(
                f"Checkpoints on {scheme}: are not supported, and {location} is one. {_USABLE}"
            ) from error
        # Drivers that come with fsspec itself say best what they lack.
        how = f" ({error})" if package == "fsspec" else f": pip install '{package}'"
        raise CheckpointError(
            f"A checkpoint on {scheme}: needs a package that is not installed, or not completely, and {location} is "
            f"one. Install it where the driver and all workers run{how}."
        ) from error
    if store is None and driver.mv is AbstractFileSystem.mv:
        # Moving would be copying, and a reader could see half of a file.
        raise CheckpointError(
            f"Checkpoints on {scheme}: are not supported, because a file there cannot be replaced in one step, and "
            f"{location} is one. {_USABLE}"
        )


def not_exclusive(place: StoreLocation) -> CheckpointError:
    return CheckpointError(
        f"{place.url} cannot be the checkpoint of a query: the store there does not create files under the condition "
        f"that they do not exist, so two drivers could run on one checkpoint and not notice. {_USABLE}"
    )


def codes_of(error: BaseException) -> frozenset[str]:
    """Returns how the store itself named an error, as code and as HTTP status, whatever the driver made of it."""
    codes: set[str] = set()
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, Mapping):  # botocore
            codes.add(str(response.get("Error", {}).get("Code")))
            codes.add(str(response.get("ResponseMetadata", {}).get("HTTPStatusCode")))
        for name in ("code", "status_code", "error_code"):  # gcsfs, azure
            code = getattr(each, name, None)
            if isinstance(code, int | str):
                codes.add(str(code))
    return frozenset(codes - {"None", ""})


def names_of(error: BaseException) -> frozenset[str]:
    """Returns the class names of an error and of its cause, also those of drivers that may not be installed."""
    return frozenset(kind.__name__ for each in (error, error.__cause__) if each for kind in type(each).__mro__)


def is_no_bucket(error: BaseException) -> bool:
    return bool(codes_of(error) & {"NoSuchBucket", "ContainerNotFound", "FilesystemNotFound"})


def is_taken(error: BaseException) -> bool:
    """Tells whether a conditional write failed because the file exists: not all stores say which condition failed."""
    return isinstance(error, FileExistsError) or bool(codes_of(error) & {"PreconditionFailed", "412"})


def is_conflict(error: BaseException) -> bool:
    """Tells whether a conditional write met another one that was not decided yet: it has to be sent again."""
    return bool(codes_of(error) & {"ConditionalRequestConflict", "OperationAborted", "409"})


def is_unsupported(error: BaseException) -> bool:
    return isinstance(error, NotImplementedError) or bool(codes_of(error) & {"NotImplemented", "501"})


def refusal(place: StoreLocation, action: str, target: str, error: Exception) -> CheckpointError:
    """Puts an error of a driver into words of our own: those of drivers tell of endpoints and users."""
    reason, advice = _explanation(place, action, error)
    code = min(codes_of(error), key=lambda each: (each.isdigit(), each), default=type(error).__name__)
    return CheckpointError(f"Cannot {action} {target}: {reason} ({code}). {advice}")


_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
    | {"DefaultCredentialsError", "TokenRetrievalError", "SSOTokenLoadError"}
)
_BAD_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
    | {"AuthenticationFailed", "InvalidSecurity", "401", "RefreshError", "ClientAuthenticationError"}
)
_TIMEOUTS = frozenset({"TimeoutError", "FSTimeoutError", "ReadTimeoutError", "ConnectTimeoutError", "RequestTimeout"})
_UNREACHABLE = frozenset(
    {"EndpointConnectionError", "ConnectionError", "ConnectionClosedError", "ClientConnectionError", "gaierror"}
    | {"HTTPClientError", "ServiceRequestError"}
)
_BUSY = frozenset({"SlowDown", "ServiceUnavailable", "InternalError", "429", "500", "502", "503", "504"})


def _explanation(place: StoreLocation, action: str, error: Exception) -> tuple[str, str]:
    signs = codes_of(error) | names_of(error)
    keys = "for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role of the machine"
    if signs & _NO_CREDENTIALS:
        return "there are no credentials for it", f"Set them where the driver and all workers run ({keys})."
    if signs & _BAD_CREDENTIALS:
        return "its credentials are not accepted", f"Renew them where the driver and all workers run ({keys})."
    if "RequestTimeTooSkewed" in signs:
        return "the clock of this machine is wrong", "Set it right, then start the query again."
    if signs & {"AccessDenied", "403", "PermissionError", "AllAccessDisabled"}:
        return "access is denied", (
            f"Allow the user of the driver and of all workers to list, read, write and delete below {place.url} (for "
            f"S3: s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject), or use another checkpoint."
        )
    if is_no_bucket(error) or ("FileNotFoundError" in signs and place.store and action != "read"):
        return "there is no such bucket", "Create it, or use another checkpoint."
    if signs & {"PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}:
        return "the bucket is in another region", "Set the region of the bucket (for S3: AWS_DEFAULT_REGION)."
    again = (
        "Check the network, and the endpoint where there is one (for S3-compatible stores: AWS_ENDPOINT_URL), then "
        "start the query again."
    )
    if signs & _TIMEOUTS:
        return "no answer in time", again
    if signs & _UNREACHABLE:
        return "the store cannot be reached", again
    if signs & _BUSY:
        return "the store is out of order or overloaded", "Start the query again in a while; it resumes."
    number = error.errno if isinstance(error, OSError) and not codes_of(error) else None
    reason = os.strerror(number) if number else "the store failed"
    return reason, f"Check the store of the checkpoint {place.url}, then start the query again."
