"""The settings of a job: one frozen object, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from anabranch.core.errors import SettingsError
from anabranch.core.keygroups import DEFAULT_KEY_GROUPS, MAX_KEY_GROUPS

PREFIX = "anabranch."
DEFAULT_CONTROL_PORT = 9008
MAX_WORKERS = 1024
MAX_PARALLELISM = MAX_KEY_GROUPS


#: What is shown of a secret.
_HIDDEN = "…"
_SECRETS = ("token", "redis_password")
_URL_PASSWORD = re.compile(r"(://[^/@]*:).*@")


def has_password(url: str) -> bool:
    """Whether a URL has a password in it, or what may be one in a misspelt URL."""
    return _URL_PASSWORD.search(url) is not None


def _setting(default: Any, name: str, doc: str) -> Any:
    return field(default=default, metadata={"name": name, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """Everything a user can set. `describe()` lists the names that users write, with their meaning."""

    workers: int = _setting(2, "workers", "how many state workers the query starts on this machine")
    worker_addresses: tuple[str, ...] = _setting(
        (), "workerAddresses", "host:port of running state workers, comma separated, to use instead of starting any"
    )
    store: str = _setting("memory", "store", "where workers keep state: memory, rocksdb or redis")
    redis_url: str = _setting(
        "redis://localhost:6379/0", "redisUrl", "the shared store of redis: redis://, rediss:// or redis+cluster://"
    )
    redis_password: str = _setting(
        "", "redisPassword", "the password of redis, if it is not in the URL; Spark does not show settings of this name"
    )
    migration: str = _setting("lazy", "migration", "how state follows a rescale: lazy, eager or restart")
    drain: bool = _setting(
        True, "drain", "lazy migration also moves state in the background; false: only what is asked for, to experiment"
    )
    key_groups: int = _setting(DEFAULT_KEY_GROUPS, "keyGroups", "hash buckets of keys; fixed when a job first starts")
    parallelism: int = _setting(0, "parallelism", "partitions of stateful stages; 0: as many as Spark has cores")
    state_path: str = _setting("", "statePath", "directory for local state of workers; empty: a temporary one")
    log_path: str = _setting(
        "", "logPath", "directory for the logs of workers that the query starts; empty: the system's temporary one"
    )
    routing_cache: bool = _setting(True, "routingCache", "tasks keep the route of their epoch instead of asking for it")
    request_timeout_s: float = _setting(120.0, "requestTimeout", "seconds to wait for a worker's answer")
    worker_timeout_s: float = _setting(
        10.0, "workerTimeout", "seconds of silence after which a worker is taken for lost"
    )
    heartbeat_s: float = _setting(1.0, "heartbeat", "seconds from one look at whether workers are alive to the next")
    start_timeout_s: float = _setting(60.0, "startTimeout", "seconds to wait for a worker to start or be reached")
    checkpoint_interval_s: float = _setting(
        0.0, "checkpointInterval", "seconds from one durable epoch to the next; 0: every epoch is durable"
    )
    snapshot_epochs: int = _setting(200, "snapshotEpochs", "a snapshot is made after at most so many epochs")
    keep_epochs: int = _setting(10, "keepEpochs", "how many of the newest epochs can be restored")
    keep_s: float = _setting(0.0, "keepSeconds", "epochs younger than this can be restored as well")
    state_location: str = _setting("", "stateLocation", "URL for the state; empty: in Spark's checkpoint")
    broadcast_bytes: int = _setting(
        64 * 1024 * 1024, "broadcastBytes", "how large a broadcast table may become, in the memory of every executor"
    )
    savepoint: str = _setting("", "savepoint", "where a new job starts from; ignored once its checkpoint is in use")
    control_host: str = _setting("127.0.0.1", "controlHost", "where the HTTP API listens; elsewhere it needs a token")
    control_port: int = _setting(
        DEFAULT_CONTROL_PORT, "controlPort", "port of the query's HTTP API; 0: any free one; -1: none"
    )
    token: str = _setting(
        "", "token", "shared secret of driver, tasks and workers; empty: drawn at random, where that is enough"
    )
    tls_certificate: str = _setting("", "tlsCertificate", "PEM file: the certificate of driver, tasks and workers")
    tls_key: str = _setting("", "tlsKey", "PEM file: the private key of the certificate")
    tls_authority: str = _setting(
        "", "tlsAuthority", "PEM file: who signs certificates; servers that have it ask clients for theirs"
    )

    #: The attributes that were given a value, be it the default.
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_range("workers", self.workers, 1, MAX_WORKERS)
        _check_range("keyGroups", self.key_groups, 1, MAX_KEY_GROUPS)
        _check_range("parallelism", self.parallelism, 0, MAX_PARALLELISM)
        _check_range("snapshotEpochs", self.snapshot_epochs, 1, 1_000_000)
        _check_range("keepEpochs", self.keep_epochs, 1, 1_000_000)
        _check_range("broadcastBytes", self.broadcast_bytes, 1, 2**31 - 1)
        if self.worker_count > self.key_groups:
            raise SettingsError(
                f"{self.worker_count} workers cannot share {self.key_groups} key groups. "
                f"Set {PREFIX}workers to at most {self.key_groups}."
            )
        if self.redis_password and has_password(self.redis_url):
            raise SettingsError(f"{PREFIX}redisUrl has a password, and {PREFIX}redisPassword is set. Leave one out.")
        _check_range("controlPort", self.control_port, -1, 65535)
        for name in ("request_timeout_s", "worker_timeout_s", "heartbeat_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{PREFIX}{_FIELDS_BY_ATTRIBUTE[name]} must be more than 0 seconds.")
        for name in ("checkpoint_interval_s", "keep_s"):
            if not getattr(self, name) >= 0:
                raise SettingsError(f"{PREFIX}{_FIELDS_BY_ATTRIBUTE[name]} must not be negative.")
        for address in self.worker_addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise SettingsError(f"{PREFIX}workerAddresses: {address!r} is not host:port, such as localhost:7077.")

    def __repr__(self) -> str:
        """All settings, without their secrets."""
        shown = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.repr}
        for name in _SECRETS:
            shown[name] = _HIDDEN if shown[name] else ""
        shown["redis_url"] = _URL_PASSWORD.sub(rf"\1{_HIDDEN}@", self.redis_url)
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def redis_location(self) -> str:
        """The URL of redis, with the password."""
        if not self.redis_password:
            return self.redis_url
        scheme, separator, rest = self.redis_url.partition("://")
        user, at, place = rest.rpartition("@")
        return f"{scheme}{separator}{user if at else ''}:{quote(self.redis_password, safe='')}@{place}"

    @property
    def worker_count(self) -> int:
        return len(self.worker_addresses) or self.workers

    @staticmethod
    def from_texts(*layers: tuple[str, Mapping[str, Any]]) -> Settings:
        """Settings from layers (where from, values by the user's names), weakest first.

        Values are texts, or what TOML gives. Names come with or without the prefix and are matched without regard to
        case, because environment variables and Spark's options do not keep it.
        """
        values: dict[str, Any] = {}
        for origin, layer in layers:
            for name, value in layer.items():
                declared = _find(name, origin)
                values[declared.name] = _parse(declared, value, origin)
        return Settings(**values, given=frozenset(values))

    @staticmethod
    def describe() -> list[tuple[str, Any, str]]:
        """Name, default and meaning of each setting."""
        return [(PREFIX + f.metadata["name"], f.default, f.metadata["doc"]) for f in _fields()]


def _fields() -> list[dataclasses.Field[Any]]:
    """Those that users can set."""
    return [f for f in dataclasses.fields(Settings) if f.metadata]


def _find(name: str, origin: str) -> dataclasses.Field[Any]:
    plain = name[len(PREFIX) :] if name.lower().startswith(PREFIX) else name
    fields = {f.metadata["name"].lower(): f for f in _fields()}
    found = fields.get(plain.lower().replace("_", ""))
    if found is None:
        near = _nearest(plain, [f.metadata["name"] for f in fields.values()], prefix=PREFIX)
        raise SettingsError(f"Unknown setting {PREFIX}{plain} in {origin}.{near}")
    return found


def _parse(declared: dataclasses.Field[Any], value: Any, origin: str) -> Any:
    name = PREFIX + declared.metadata["name"]
    wanted: Any = type(declared.default)
    text = str(value).strip()
    try:
        if wanted is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if wanted is tuple:
            items = value if isinstance(value, list) else text.split(",")
            return tuple(str(item).strip() for item in items if str(item).strip())
        if wanted in (int, float):
            return wanted(text)
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number of seconds"}[wanted]
        raise SettingsError(f"{name} is {text!r} in {origin}; it must be {expected}.") from None
    return text


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuses a value that is none of the choices, and names the nearest one."""
    if value not in choices:
        near = _nearest(value, choices)
        raise SettingsError(f"{PREFIX}{name} is {value!r}; it can be {' or '.join(choices)}.{near}")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SettingsError(f"{PREFIX}{name} is {value}; it must be between {low} and {high}.")


def _nearest(word: str, candidates: Any, prefix: str = "") -> str:
    close = difflib.get_close_matches(word.lower(), [c.lower() for c in candidates], n=1, cutoff=0.5)
    if not close:
        return f" Valid ones: {', '.join(prefix + c for c in candidates)}."
    return f" Did you mean {prefix}{next(c for c in candidates if c.lower() == close[0])}?"


_FIELDS_BY_ATTRIBUTE = {f.name: f.metadata["name"] for f in _fields()}
