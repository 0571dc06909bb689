"""What the demonstration is asked to do, checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch.core.errors import SettingsError
from anabranch.core.settings import MAX_PARALLELISM, MAX_WORKERS, STORES

#: What numbers may be, both ends included.
LIMITS: Mapping[str, tuple[float, float]] = {
    "seconds": (1, 86_400),
    "rate": (0.1, 1_000_000),
    "keys": (1, 2**31 - 1),
    "skew": (0, 100),
    "workers": (1, MAX_WORKERS),
    "parallelism": (1, MAX_PARALLELISM),
    "work_ms": (0, 60_000),
    "count_ms": (0, 60_000),
    "junk_bytes": (0, 16 * 2**20),
}

_UNITS_S = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0}
_TRIGGER = re.compile(r"\s*(\d+)\s+(millisecond|second|minute|hour)s?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class DemoOptions:
    """The options of ``anabranch demo``; a wrong one is refused with a sentence that names it."""

    #: How long events arrive; recorded events are read for this long at most.
    seconds: float = 30.0
    #: Events a second.
    rate: float = 200.0
    #: Different server names.
    keys: int = 100_000
    #: Zipf exponent over the server names; 0 is uniform.
    skew: float = 0.0
    workers: int = 2
    parallelism: int = 2
    store: str = "memory"
    #: CPU time for each row of stage 2.
    work_ms: float = 5.0
    #: CPU time for each row of stage 3.
    count_ms: float = 0.0
    #: State that stage 3 adds with each row, besides the count.
    junk_bytes: int = 0
    #: A directory of recorded events, to read instead of generating any.
    input: Path | None = None
    #: How often an epoch begins, in Spark's words.
    trigger: str = "0 seconds"
    #: How long the rows that are still on their way may take, after the last has arrived; None: it depends.
    drain_limit_s: float | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            # Written so that NaN, which compares with nothing, is refused too.
            if not low <= value <= high:
                raise SettingsError(
                    f"{flag(name)} is {value:g}, but it must be between {low:,} and {high:,}. "
                    "Choose a value in that range."
                )
        if self.store not in STORES:
            raise SettingsError(f"--store is '{self.store}', which is not a store. Choose {' or '.join(STORES)}.")
        if _TRIGGER.fullmatch(self.trigger) is None:
            raise SettingsError(
                f"--trigger is '{self.trigger}', which is not a time. Give something like '0 seconds', "
                "'500 milliseconds' or '1 minute'."
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


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return "--" + name.replace("_", "-")
