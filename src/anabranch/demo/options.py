"""What the demonstration is asked to do, and the recorded events that it may read; checked before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch.control.strategies import MIGRATIONS, strategy_of
from anabranch.core.errors import SettingsError
from anabranch.core.settings import MAX_PARALLELISM, MAX_WORKERS
from anabranch.worker.stores import STORES

#: What numbers may be, both ends included.
LIMITS: Mapping[str, tuple[float, float]] = {
    "seconds": (1, 86_400),
    "rate": (0.1, 1_000_000),
    "keys": (1, 2**31 - 1),
    "skew": (0, 100),
    "workers": (1, MAX_WORKERS),
    "parallelism": (1, MAX_PARALLELISM),
    "rescale_to": (0, MAX_WORKERS),
    "rescale_at": (0, 86_400),
    "work_ms": (0, 60_000),
    "count_ms": (0, 60_000),
    "junk_bytes": (0, 16 * 2**20),
}
#: What the job needs of a recorded event, with Spark's types.
NEEDED = {"id": "LONG", "server_name": "STRING"}

_FORMATS = ("json", "csv", "parquet")
_UNITS_S = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0}
_TRIGGER = re.compile(r"\s*(\d+)\s+(millisecond|second|minute|hour)s?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class DemoOptions:
    """The options of ``anabranch demo``, whose help says what each is; a wrong one is refused by its name."""

    seconds: float = 30.0
    rate: float = 200.0
    keys: int = 100_000
    skew: float = 0.0
    workers: int = 2
    parallelism: int = 2
    #: None: to twice as many workers as the run begins with; 0: it is not rescaled.
    rescale_to: int | None = None
    #: None: in the middle.
    rescale_at: float | None = None
    migration: str = "lazy"
    routing_cache: bool = True
    drain: bool = True
    store: str = "memory"
    #: None: the one that the settings name.
    redis_url: str | None = None
    work_ms: float = 5.0
    count_ms: float = 0.0
    junk_bytes: int = 0
    #: A directory of recorded events, which are read for `seconds` at most.
    input: Path | None = None
    #: How often an epoch begins, in Spark's words.
    trigger: str = "0 seconds"
    #: How long the rows that are still on their way may take, after the last has arrived; None: it depends.
    drain_limit_s: float | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            # Written so that NaN, which compares with nothing, is refused too.
            if value is not None and not low <= value <= high:
                raise SettingsError(
                    f"{flag(name)} is {value:g}, but it must be between {low:,} and {high:,}. "
                    "Choose a value in that range."
                )
        if self.store not in STORES:
            raise SettingsError(f"--store is '{self.store}', which is not a store. Choose {' or '.join(STORES)}.")
        if self.redis_url is not None and not STORES[self.store].is_shared:
            raise SettingsError(f"--redis-url is given, but --store is {self.store}. Give --store redis as well.")
        if self.migration not in MIGRATIONS:
            raise SettingsError(
                f"--migration is '{self.migration}', which is no way to move state. Choose {' or '.join(MIGRATIONS)}."
            )
        if _TRIGGER.fullmatch(self.trigger) is None:
            raise SettingsError(
                f"--trigger is '{self.trigger}', which is not a time. Give something like '0 seconds', "
                "'500 milliseconds' or '1 minute'."
            )
        self._check_rescale()

    def _check_rescale(self) -> None:
        if self.rescale_to == self.workers:
            raise SettingsError(
                f"--rescale-to is {self.rescale_to}, as many workers as the run begins with. Choose another number, "
                "or 0 for no rescale."
            )
        has_drain = strategy_of(self.migration, store_is_shared=STORES[self.store].is_shared).has_drain
        if not self.drain and not has_drain:
            raise SettingsError(
                f"--no-drain is about lazy migration, but --migration is {self.migration} and --store {self.store}. "
                "Leave it out, or choose --migration lazy and another --store."
            )
        if not self.drain and 0 < self.workers_after < self.workers:
            raise SettingsError(
                f"--rescale-to is {self.workers_after}, fewer workers than at first, but with --no-drain no worker can "
                "leave. Choose a greater number, or leave --no-drain out."
            )
        if self.rescale_at is not None and self.rescale_to == 0:
            raise SettingsError("--rescale-at says when to rescale, but --rescale-to is 0. Leave one of the two out.")
        if self.rescale_at is not None and self.rescale_at >= self.seconds:
            raise SettingsError(
                f"--rescale-at is {self.rescale_at:g}, but the run is over after {self.seconds:g} seconds. "
                "Choose an earlier time, or more --seconds."
            )

    @property
    def rows(self) -> int:
        """How many events are generated."""
        return max(1, round(self.rate * self.seconds))

    @property
    def limit_s(self) -> float:
        """When the job is stopped, whatever is still on its way."""
        if self.input is not None:
            return self.seconds
        return self.seconds + (max(10.0, self.seconds / 2) if self.drain_limit_s is None else self.drain_limit_s)

    @property
    def setup(self) -> str:
        """How state is reached and moved, in words."""
        left_out = [*([] if self.drain else ["--no-drain"]), *([] if self.routing_cache else ["--no-routing-cache"])]
        return ", ".join([self.migration, *left_out])

    @property
    def workers_after(self) -> int:
        """How many workers there are after the rescale; 0: there is none."""
        if self.rescale_to is not None:
            return self.rescale_to
        return 2 * self.workers if 2 * self.workers <= MAX_WORKERS else self.workers // 2

    @property
    def parallelism_after(self) -> int:
        """The parallelism with which each worker has as many tasks as before."""
        return min(MAX_PARALLELISM, max(1, round(self.parallelism * self.workers_after / self.workers)))

    @property
    def rescale_at_s(self) -> float:
        return self.seconds / 2 if self.rescale_at is None else self.rescale_at

    @property
    def trigger_s(self) -> float:
        match = _TRIGGER.fullmatch(self.trigger)
        assert match is not None
        return int(match[1]) * _UNITS_S[match[2].lower()]

    @property
    def max_rows_per_epoch(self) -> int:
        """The most rows that an epoch takes.

        Without a bound, a job that is behind takes longer and longer epochs, and cannot be stopped soon.
        """
        return max(1, round(self.rate * max(5.0, 2 * self.trigger_s)))


@dataclass(frozen=True)
class RecordedEvents:
    """Event files of one format."""

    directory: Path
    format: str
    #: The columns to read, in Spark's words. Of CSV files these are all that there are, because they go by position.
    schema: str
    #: How many files there are, each of them an epoch.
    files: int = 1


def find_recorded(directory: Path) -> RecordedEvents:
    """Look at the files of a directory, and refuse what the job could not read."""
    advice = f"Make event files with: anabranch workgen {directory} --rows 10000 --files 20"
    if not directory.is_dir():
        raise SettingsError(f"--input is {directory}, which is not a directory. {advice}")
    # Spark's file source does not read hidden files either.
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name[0] not in "._")
    formats = {path.suffix.removeprefix(".") for path in files}
    if not files:
        raise SettingsError(f"--input is {directory}, which holds no files. {advice}")
    if len(formats) > 1 or not formats.issubset(_FORMATS):
        raise SettingsError(
            f"--input is {directory}, which holds files of the kinds {', '.join(sorted(formats))}. "
            f"Choose a directory with files of one kind: {', '.join(_FORMATS)}."
        )
    (format,) = formats
    try:
        columns = _columns(files[0], format)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{files[0]} cannot be read as {format}: {error}. Choose another --input.") from None
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise SettingsError(
            f"The events in {files[0]} have no {' and no '.join(missing)}. "
            "Choose events like those of anabranch workgen."
        )
    read = columns if format == "csv" else list(NEEDED)
    schema = ", ".join(f"`{name}` {NEEDED.get(name, 'STRING')}" for name in read)
    return RecordedEvents(directory, format, schema, len(files))


def _columns(path: Path, format: str) -> list[str]:
    """Return the names of the columns of a file."""
    if format == "parquet":
        # Takes half a second to import, and only this format needs it.
        import pyarrow.parquet as pq

        return list(pq.read_schema(path).names)
    with path.open(encoding="utf-8") as lines:
        first = lines.readline()
    if format == "csv":
        return [name.strip().strip('"') for name in first.split(",")]
    document = json.loads(first)
    return list(document) if isinstance(document, dict) else []


def flag(name: str) -> str:
    """Write an option as it stands on the command line."""
    return "--" + name.replace("_", "-")
