"""Events like Wikipedia's edits: every column a pure function of the specification and the event's number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.errors import SettingsError
from anabranch.workload.draws import Bits, Integers, below, bits, choices, ranks
from anabranch.workload.schedule import Schedule

#: The event time of event 0, unless a specification says otherwise: 2024-01-01T00:00:00Z.
FIRST_TIME_US = 1_704_067_200_000_000

DEFAULT_SCHEDULE = Schedule(0, FIRST_TIME_US, 1000.0)

#: What a specification's numbers may be, both ends included.
LIMITS: Mapping[str, tuple[float, float]] = {
    "keys": (1, 2**31 - 1),
    "ids": (1, 2**31 - 1),
    "skew": (0.0, 100.0),
    "seed": (0, 2**64 - 1),
    "payload_bytes": (0, 16 * 2**20),
    "disorder_ms": (0, 2**31 - 2),
}

_CHUNK_ROWS_MAX = 65_536
_CHUNK_BYTES = 32 * 2**20
_ROW_BYTES = 256
#: Up to this many keys, all their names are made once and kept, which is several times faster.
_CACHED_NAMES_MAX = 1_000_000
_TYPES = ("edit", "categorize", "log", "new")
_TYPE_WEIGHTS = (62, 24, 8, 6)
_NEW = _TYPES.index("new")
_NAMESPACES = (0, 14, 6, 4, 3, 2, 1, 10)
_NAMESPACE_WEIGHTS = (58, 20, 5, 4, 4, 3, 3, 3)
_BOT_WEIGHTS = (7, 3)
#: Titles are a quality, a thing and a suffix; the names of users are a quality and a thing.
_QUALITIES = (
    "Amber Ancient Blue Broad Calm Clear Coastal Cold Copper Crooked Deep Distant Eastern Fallen Far Forgotten Golden "
    "Great Green Grey Hidden High Hollow Inland Iron Little Lone Long Lost Lower Misty Narrow New Northern Old Open "
    "Pale Quiet Red Royal Silent Silver Southern Stony Tall Upper Western White"
)
_THINGS = (
    "Abbey Bay Bridge Brook Canal Castle Channel Chapel Cliff Creek Delta Falls Ferry Field Forest Garden Glacier "
    "Harbour Heath Hill Island Lake Light Marsh Meadow Mill Moor Mountain Museum Oak Orchard Otter Park Pass Plain "
    "Pond Quarry Railway Ridge River Road Station Stone Tower Valley Village Wharf Wood"
)
_SUFFIXES = (
    *("", " (album)", " (film)", " (disambiguation)", " County", " District", " School", " Railway Company"),
    *(" in 1914", " in 1968", " and its history", " Cup 2012", " (novel)", " Football Club", " Bridge", " Line"),
)
_ACCOUNTS_PER_NAME = 9
_PAYLOAD_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)


def check_limits(values: Mapping[str, float], label: Callable[[str], str] = str) -> None:
    """Refuse the first value outside of its limits, with an error that names it; label gives the user's name for it."""
    for name, value in values.items():
        low, high = LIMITS[name]
        # Written so that NaN, which compares with nothing, is refused too.
        if not low <= value <= high:
            raise SettingsError(
                f"{label(name)} is {value}, but it must be between {low} and {high}. Choose a value in that range."
            )


@dataclass(frozen=True)
class WorkloadSpec:
    """A specification of events. Two equal specifications give equal events."""

    #: How many different server names there are: server-1 .. server-<keys>.
    keys: int = 100_000
    #: Ids are 1 .. ids.
    ids: int = 100
    #: The exponent of a Zipf distribution over the server names, server-1 the most frequent; 0 is uniform.
    skew: float = 0.0
    seed: int = 0
    #: The length of the payload column; at 0 there is no such column.
    payload_bytes: int = 0
    #: Event times are up to this much earlier than the schedule says, so events come out of order.
    disorder_ms: int = 0
    #: The event times, before disorder.
    schedule: Schedule = DEFAULT_SCHEDULE

    def __post_init__(self) -> None:
        check_limits({name: getattr(self, name) for name in LIMITS})
        rate = self.schedule.rows_per_second
        if not (rate >= 0 and math.isfinite(rate)):
            raise SettingsError(f"The schedule has {rate} rows a second. Choose a number that is not negative.")


def event_schema(spec: WorkloadSpec, columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the columns of the events: all of them, or those asked for, in that order."""
    full = pa.schema([(name, kind) for name, (kind, _) in _COLUMNS.items()])
    if spec.payload_bytes == 0:
        full = full.remove(full.get_field_index("payload"))
    if columns is None:
        return full
    check_columns(columns, full.names)
    return pa.schema([full.field(name) for name in columns])


def check_columns(columns: Sequence[str], known: Sequence[str], label: str = "columns") -> None:
    """Refuse columns that are unknown or named twice, and a choice of none."""
    if not columns:
        raise SettingsError(f"{label} names no column. Choose from {', '.join(known)}, or leave it out.")
    for name in columns:
        if name == "payload" and name not in known:
            raise SettingsError(
                f"{label} asks for payload, which events of 0 payload bytes do not have. "
                "Set the payload bytes to more than 0, or leave the column out."
            )
        if name not in known:
            near = get_close_matches(name, known, 1)
            advice = f"Did you mean '{near[0]}'?" if near else f"Choose from {', '.join(known)}."
            raise SettingsError(f"{label} asks for '{name}', which events do not have. {advice}")
    if len(set(columns)) < len(columns):
        raise SettingsError(f"{label} names a column twice: {', '.join(columns)}. Name each column once.")


def chunk_rows(spec: WorkloadSpec) -> int:
    """Return how many events are made at a time: enough to work in columns, few enough to stay in the caches."""
    return max(1, min(_CHUNK_ROWS_MAX, _CHUNK_BYTES // (_ROW_BYTES + spec.payload_bytes)))


def generate(spec: WorkloadSpec, start: int, count: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Make events start .. start + count - 1. Columns that are not asked for cost nothing."""
    if start < 0 or count < 0:
        raise ValueError(f"There are no events {start} .. {start + count - 1}: events are numbered from 0 on.")
    schema = event_schema(spec, columns)
    return pa.Table.from_batches(generate_batches(spec, start, count, schema.names), schema)


def generate_batches(
    spec: WorkloadSpec, start: int, count: int, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Make events start .. start + count - 1, one chunk at a time, so that memory stays bounded."""
    schema = event_schema(spec, columns)
    step = chunk_rows(spec)
    for first in range(start, start + count, step):
        size = min(step, start + count - first)
        arrays = [_COLUMNS[name][1](spec, first, size) for name in schema.names]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


@lru_cache(maxsize=1)
def _title_pool() -> pa.StringArray:
    return pa.array([f"{q} {t}{s}" for q, t, s in product(_QUALITIES.split(), _THINGS.split(), _SUFFIXES)], pa.string())


@lru_cache(maxsize=1)
def _user_pool() -> tuple[pa.StringArray, int]:
    """Return the names of people, then those of bots, and how many are people."""
    names = [f"{q}{t}" for q, t in product(_QUALITIES.split(), _THINGS.split())]
    people = [f"{name}{number}" for name in names for number in range(1, _ACCOUNTS_PER_NAME + 1)]
    bots = [f"{name}Bot" for name in names[::10]]
    return pa.array(people + bots, pa.string()), len(people)


@lru_cache(maxsize=4)
def _server_pool(keys: int) -> pa.StringArray:
    return _named_servers(np.arange(keys, dtype=np.int64))


def _named_servers(chosen: Integers) -> pa.StringArray:
    return pc.binary_join_element_wise("server-", pa.array(chosen + 1).cast(pa.string()), "")


def _ids(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    return pa.array(below(bits(spec.seed, "id", first, count), spec.ids) + 1)


def _servers(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    chosen = ranks(spec.seed, "server_name", first, count, size=spec.keys, skew=spec.skew)
    if spec.keys > _CACHED_NAMES_MAX:
        return _named_servers(chosen)
    return _server_pool(spec.keys).take(pa.array(chosen))


def _titles(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    pool = _title_pool()
    return pool.take(pa.array(below(bits(spec.seed, "title", first, count), len(pool))))


def _is_bot(spec: WorkloadSpec, first: int, count: int) -> Integers:
    return choices(bits(spec.seed, "bot", first, count), _BOT_WEIGHTS)


def _bots(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    return pa.array(_is_bot(spec, first, count).astype(np.bool_))


def _users(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    """Give bots names of their own, and far fewer of them than people, as on Wikipedia."""
    pool, people = _user_pool()
    draws = bits(spec.seed, "user", first, count)
    person, bot = below(draws, people), below(draws, len(pool) - people)
    return pool.take(pa.array(np.where(_is_bot(spec, first, count) == 1, bot + people, person)))


def _type_numbers(spec: WorkloadSpec, first: int, count: int) -> Integers:
    return choices(bits(spec.seed, "type", first, count), _TYPE_WEIGHTS)


def _types(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    return pa.array(_TYPES).take(pa.array(_type_numbers(spec, first, count)))


def _namespaces(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    numbers = choices(bits(spec.seed, "namespace", first, count), _NAMESPACE_WEIGHTS)
    return pa.array(np.asarray(_NAMESPACES, dtype=np.int32)[numbers])


def _lengths_before(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    """Make lengths close to log-normal, around 1,500 bytes: a random power of two times 64 .. 127; new pages have 0."""
    draws = bits(spec.seed, "length_old", first, count)
    powers = np.bitwise_count(draws & np.uint64(0x1FF)).astype(np.uint64)
    lengths: Bits = ((draws >> np.uint64(58)) + np.uint64(64)) << powers
    lengths[_type_numbers(spec, first, count) == _NEW] = 0
    return pa.array(lengths.view(np.int64))


def _lengths_after(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    """Let most edits add a few bytes, and one in four take some away; a page cannot shrink below nothing."""
    draws = bits(spec.seed, "length_new", first, count)
    powers = np.bitwise_count(draws & np.uint64(0x7F)).astype(np.uint64)
    sizes = (((draws >> np.uint64(60)) + np.uint64(1)) << powers).view(np.int64)
    sizes[(draws >> np.uint64(32)) & np.uint64(3) == 0] *= -1
    return pa.array(np.maximum(_lengths_before(spec, first, count).to_numpy() + sizes, 0))


def _timestamps(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    times_us = spec.schedule.times_us(first, count)
    if spec.disorder_ms:
        times_us -= below(bits(spec.seed, "disorder", first, count), spec.disorder_ms + 1) * 1000
    return pa.array(times_us).view(pa.timestamp("us", tz="UTC"))


def _payloads(spec: WorkloadSpec, first: int, count: int) -> pa.Array:
    """Make texts that hardly compress, of letters that need no escaping anywhere."""
    words = -(-spec.payload_bytes // 8)
    draws = bits(spec.seed, "payload", first * words, count * words)
    letters = _PAYLOAD_ALPHABET[draws.view(np.uint8) & np.uint8(63)].reshape(count, words * 8)
    letters = np.ascontiguousarray(letters[:, : spec.payload_bytes])
    offsets = np.arange(0, (count + 1) * spec.payload_bytes, spec.payload_bytes, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(letters))


_COLUMNS: Mapping[str, tuple[pa.DataType, Callable[[WorkloadSpec, int, int], pa.Array]]] = {
    "id": (pa.int64(), _ids),
    "server_name": (pa.string(), _servers),
    "title": (pa.string(), _titles),
    "user": (pa.string(), _users),
    "bot": (pa.bool_(), _bots),
    "type": (pa.string(), _types),
    "namespace": (pa.int32(), _namespaces),
    "length_old": (pa.int64(), _lengths_before),
    "length_new": (pa.int64(), _lengths_after),
    "timestamp": (pa.timestamp("us", tz="UTC"), _timestamps),
    "payload": (pa.string(), _payloads),
}
