"""The rows of key groups in Redis: where they are, and how many of them are read and changed at a time.

A key group has three kinds of Redis keys, all with its number as hash tag, so that they are in one slot of a cluster:

    <prefix>:<incarnation>:{<group>}:head           hash    version and number of rows
    <prefix>:<incarnation>:{<group>}:values         hash    of a value variable: value by key
    <prefix>:<incarnation>:{<group>}:keys           set     of a list or map: its keys
    <prefix>:<incarnation>:{<group>}:entries:<key>  hash    of a list or map: value by sub-key

A key is written as its hash, eight bytes, and its encoded form.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import WorkerError
from anabranch.core.schemas import Op, VariableKind
from anabranch.worker.state.codec import Encoded, from_objects, to_objects
from anabranch.worker.state.rows import Changes, Entries, Hashes, Keys, Rows, Shape
from anabranch.worker.stores import redis_scripts as scripts
from anabranch.worker.stores.redis_connection import Command, RedisConnection

#: Bounds of one command. (A script can pass on about 8000 values at once, and a change of a value is two of them.)
_COMMAND_ROWS = 2000
_COMMAND_BYTES = 4 << 20
#: An answer with more bytes than this ends with the row that made it so; the rest is asked for again.
_ANSWER_BYTES = 16 << 20
_HASH_BYTES = 8
#: Key groups, and keys of each, whose size is measured, to estimate that of all entries.
_SIZE_SAMPLES = 32

Groups = npt.NDArray[Any]


@dataclass(slots=True)
class GroupPlace:
    """Where the rows of a key group are, and the version that they have at least."""

    group: int
    name: bytes
    version: int = 0
    #: Whether Redis has lost some of them, or may have made a half of a change. It is of no use any more.
    is_lost: bool = False

    @property
    def head(self) -> bytes:
        return self.name + b":head"

    @property
    def values(self) -> bytes:
        return self.name + b":values"

    @property
    def keys(self) -> bytes:
        return self.name + b":keys"

    def entries(self, keys: Collection[bytes]) -> list[bytes]:
        prefix = self.name + b":entries:"
        return [prefix + key for key in keys]


Places = Mapping[int, GroupPlace]


class GroupRows:
    """Reads and changes rows of key groups that the caller names. It keeps nothing of them."""

    def __init__(self, shape: Shape, connection: RedisConnection) -> None:
        self._shape = shape
        self._of_values = shape.kind is VariableKind.VALUE
        self._connection = connection
        self._begin, self._count = connection.script(scripts.BEGIN), connection.script(scripts.COUNT)
        self._scan = connection.script(scripts.SCAN_VALUES)
        self._read = connection.script(scripts.READ_VALUES if self._of_values else scripts.READ_ENTRIES)
        self._write = connection.script(scripts.WRITE_VALUES if self._of_values else scripts.WRITE_ENTRIES)

    def begin(self, places: Collection[GroupPlace]) -> list[GroupPlace]:
        """Make sure that these are there, and note their versions. Those that were not are returned."""
        commands: list[Command] = [("EVALSHA", self._begin, 1, place.head) for place in places]
        made = []
        for place, (is_new, version) in zip(places, self._connection.run(commands), strict=True):
            place.version = version
            if is_new:
                made.append(place)
        return made

    def counts(self, places: Sequence[GroupPlace]) -> list[int]:
        """The number of rows of each."""
        return self._run(places, [("EVALSHA", self._count, 1, place.head, place.version) for place in places])

    def read(self, keys: Keys, places: Places) -> Entries:
        """The entries of these keys, ordered by the keys' positions."""
        groups = self._shape.groups_of(keys.hashes)
        order = np.argsort(groups, kind="stable")
        found = self._read_fields(_fields(keys.take(order)), groups[order], places)
        return Entries(order[found.index], found.subkeys, found.values).in_order()

    def change(self, changes: Changes, places: Places) -> None:
        """Apply changes; the places get the versions that this makes. If it fails, they are lost."""
        lost = sorted(group for group, place in places.items() if place.is_lost)
        if lost:
            raise self._lost(lost)
        commands = self._value_commands(changes, places) if self._of_values else self._entry_commands(changes, places)
        changed = [place for place, _ in commands]
        try:
            versions = self._run(changed, [command for _, command in commands])
        except BaseException:
            # Some changes may have been made, or be under way still: the next ones must not get the same numbers.
            for place in changed:
                place.is_lost = True
            raise
        for place, version in zip(changed, versions, strict=True):
            place.version = max(place.version, version)

    def all_of(self, places: Sequence[GroupPlace]) -> Rows:
        """All rows of these key groups."""
        if self._of_values:
            fields, values = self._scan_values(places)
            subkeys: Encoded = np.empty((len(values), 0), dtype=np.uint8)
        else:
            members = self._members(places)
            self.counts(places)  # a Redis that has lost the keys would seem to have none
            groups = np.repeat([place.group for place in places], [len(of_group) for of_group in members])
            width = self._shape.key_width
            all_fields = from_objects([m for of_group in members for m in of_group], _field_width(width))
            entries = self._read_fields(all_fields, groups, {place.group: place for place in places})
            fields, subkeys, values = all_fields[entries.index], entries.subkeys, entries.values
        return Rows(*_keys_of(fields, self._shape.key_width), subkeys, values)

    def remove(self, places: Sequence[GroupPlace]) -> None:
        """Remove these key groups. The heads go first: what is half gone is not taken for a key group."""
        self._connection.run([("UNLINK", place.head) for place in places])
        if self._of_values:
            self._connection.run([("UNLINK", place.values) for place in places])
            return
        commands: list[Command] = []
        for place, members in zip(places, self._members(places), strict=True):
            names = [*place.entries(members), place.keys]
            commands += [("UNLINK", *names[i : i + _COMMAND_ROWS]) for i in range(0, len(names), _COMMAND_ROWS)]
        self._connection.run(commands)

    def size_bytes(self, places: Sequence[GroupPlace]) -> int:
        """The memory that these key groups take in Redis, as it estimates it itself."""
        names = [name for place in places for name in (place.head, place.values if self._of_values else place.keys)]
        total = sum(size or 0 for size in self._connection.run([("MEMORY", "USAGE", name) for name in names]))
        return total if self._of_values else total + self._entry_bytes(places)

    def _entry_bytes(self, places: Sequence[GroupPlace]) -> int:
        sampled = places[:: len(places) // _SIZE_SAMPLES + 1]
        commands: list[Command] = [("SRANDMEMBER", place.keys, _SIZE_SAMPLES) for place in sampled]
        commands += [("SCARD", place.keys) for place in places]
        answers = self._connection.run(commands)
        samples, keys = answers[: len(sampled)], sum(answers[len(sampled) :])
        names = [name for place, of in zip(sampled, samples, strict=True) for name in place.entries(of)]
        sizes = self._connection.run([("MEMORY", "USAGE", name) for name in names])
        return sum(size or 0 for size in sizes) * keys // len(names) if names else 0

    def _run(self, places: Sequence[GroupPlace], commands: Sequence[Command]) -> list[Any]:
        """The answers of scripts, each of which is about a place."""
        answers = self._connection.run(commands)
        lost = {place.group: place for place, answer in zip(places, answers, strict=True) if answer is None}
        if lost:
            for place in lost.values():
                place.is_lost = True
            raise self._lost(sorted(lost))
        return answers

    def _lost(self, groups: Sequence[int]) -> WorkerError:
        return WorkerError(
            f"Redis at {self._connection.address} no longer has the state of {len(groups)} key groups, of {groups[0]} "
            "for one: it was restarted, emptied, or replaced by a replica that is behind, or a change failed. Nothing "
            "is lost, as the checkpoint has all of it: a running query restores these key groups from there; if it has "
            "ended, start it again."
        )

    def _read_fields(self, fields: Encoded, groups: Groups, places: Places) -> Entries:
        """The entries of keys that are ordered by key group, in no order."""
        parts = _Answers()
        wanted = list(_cuts(groups, _sizes(fields)))
        while wanted:
            commands = [self._read_command(places[int(groups[start])], fields[start:end]) for start, end in wanted]
            of = [places[int(groups[start])] for start, _ in wanted]
            rest = []
            for (start, end), answer in zip(wanted, self._run(of, commands), strict=True):
                answered = parts.add_values(start, *answer) if self._of_values else parts.add_entries(start, *answer)
                if start + answered < end:
                    rest.append((start + answered, end))
            wanted = rest
        return parts.entries(self._shape)

    def _read_command(self, place: GroupPlace, fields: Encoded) -> Command:
        if self._of_values:
            head: list[bytes | str | int] = ["EVALSHA", self._read, 2, place.head, place.values]
            return [*head, place.version, _ANSWER_BYTES, *_column(fields)]
        names = place.entries(to_objects(fields))
        return ["EVALSHA", self._read, 1 + len(names), place.head, *names, place.version, _ANSWER_BYTES]

    def _value_commands(self, changes: Changes, places: Places) -> list[tuple[GroupPlace, Command]]:
        """Of each key group, what is removed before what is put: CLEAR applies first."""
        groups, puts = self._shape.groups_of(changes.hashes), changes.ops == Op.PUT
        order = np.lexsort((puts, groups))
        changes, groups, puts = changes.take(order), groups[order], puts[order]
        fields = _fields(Keys(changes.hashes, changes.keys))
        commands: list[tuple[GroupPlace, Command]] = []
        sent: Counter[int] = Counter()
        for start, end in _cuts(groups, _sizes(fields) + _sizes(changes.values)):
            split = end - int(np.count_nonzero(puts[start:end]))
            place = places[int(groups[start])]
            columns = (fields[start:split], fields[split:end], changes.values[split:end])
            number = place.version + sent[place.group]
            sent[place.group] += 1
            command: list[bytes | str | int] = ["EVALSHA", self._write, 2, place.head, place.values, number]
            command += [part for column in columns for part in _column(column)]
            commands.append((place, command))
        return commands

    def _entry_commands(self, changes: Changes, places: Places) -> list[tuple[GroupPlace, Command]]:
        """All of a key together: CLEAR, then what is removed, then what is put."""
        fields = to_objects(_fields(Keys(changes.hashes, changes.keys)))
        numbers: dict[bytes, int] = {}
        keys = np.fromiter((numbers.setdefault(field, len(numbers)) for field in fields), np.int64, len(fields))
        groups = self._shape.groups_of(changes.hashes)
        order = np.lexsort((changes.ops == Op.PUT, changes.ops != Op.CLEAR, keys, groups))
        changes, fields, keys, groups = changes.take(order), fields[order], keys[order], groups[order]
        commands: list[tuple[GroupPlace, Command]] = []
        sent: Counter[int] = Counter()
        for start, end in _cuts(groups, _sizes(fields) + _sizes(changes.subkeys) + _sizes(changes.values)):
            firsts = np.flatnonzero(np.diff(keys[start:end], prepend=-1))
            ops, place = changes.ops[start:end], places[int(groups[start])]
            cleared = np.add.reduceat(ops == Op.CLEAR, firsts, dtype=np.int64) > 0
            counts = [np.add.reduceat(ops == op, firsts, dtype="<u4").astype("<u4") for op in (Op.DELETE, Op.PUT)]
            removed, put = (start + np.flatnonzero(ops == op) for op in (Op.DELETE, Op.PUT))
            members = fields[start + firsts]
            names = place.entries(members)
            columns = (changes.subkeys[removed], changes.subkeys[put], changes.values[put])
            command: list[bytes | str | int] = ["EVALSHA", self._write, 2 + len(names), place.head, place.keys]
            number = place.version + sent[place.group]
            sent[place.group] += 1
            command += [*names, number, *_column(members), (cleared + ord("0")).astype(np.uint8).tobytes()]
            command += [count.tobytes() for count in counts]
            command += [part for column in columns for part in _column(column)]
            commands.append((place, command))
        return commands

    def _scan_values(self, places: Sequence[GroupPlace]) -> tuple[Encoded, Encoded]:
        """All fields and values. Only a scan of several steps can meet a row twice."""
        width = _field_width(self._shape.key_width), self._shape.value_width
        parts: list[tuple[Encoded, Encoded]] = []
        longer: dict[int, dict[bytes, bytes]] = {}
        wanted: list[tuple[GroupPlace, bytes]] = [(place, b"0") for place in places]
        while wanted:
            of = [place for place, _ in wanted]
            scan = ("EVALSHA", self._scan, 2)
            commands = [(*scan, p.head, p.values, p.version, cursor, _COMMAND_ROWS) for p, cursor in wanted]
            wanted = []
            for place, answer in zip(of, self._run(of, commands), strict=True):
                cursor, sizes, fields_data, value_sizes, values_data = answer
                found = _decoded(sizes, fields_data, width[0]), _decoded(value_sizes, values_data, width[1])
                if cursor != b"0":
                    wanted.append((place, cursor))
                if cursor != b"0" or place.group in longer:
                    longer.setdefault(place.group, {}).update(zip(*map(to_objects, found), strict=True))
                else:
                    parts.append(found)
        for rows in longer.values():
            parts += [(from_objects(list(rows), width[0]), from_objects(list(rows.values()), width[1]))]
        nothing = from_objects([], width[0]), from_objects([], width[1])
        fields, values = zip(*(parts or [nothing]), strict=True)
        return np.concatenate(fields), np.concatenate(values)

    def _members(self, places: Sequence[GroupPlace]) -> list[list[bytes]]:
        """The keys of each key group."""
        found: list[dict[bytes, None]] = [{} for _ in places]
        wanted = [(i, 0) for i in range(len(places))]
        while wanted:
            commands: list[Command] = [
                ("SSCAN", places[i].keys, cursor, "COUNT", _COMMAND_ROWS) for i, cursor in wanted
            ]
            answers = zip(wanted, self._connection.run(commands), strict=True)
            wanted = []
            for (i, _), (cursor, members) in answers:
                found[i].update(dict.fromkeys(members))
                if int(cursor):
                    wanted.append((i, int(cursor)))
        return [list(members) for members in found]


class _Answers:
    """Answers to reads, until all of them are there."""

    def __init__(self) -> None:
        self._index: list[npt.NDArray[np.intp]] = []
        #: Columns of sub-keys and of values: sizes and data.
        self._subkeys: list[tuple[bytes, bytes]] = []
        self._values: list[tuple[bytes, bytes]] = []

    def add_values(self, start: int, sizes: bytes, values: bytes) -> int:
        """How many keys these are an answer to."""
        every_size = np.frombuffer(sizes, "<i4")
        present = np.flatnonzero(every_size >= 0)
        self._index.append(start + present)
        self._values.append((every_size[present].tobytes(), values))
        return len(every_size)

    def add_entries(self, start: int, counts: bytes, *columns: bytes) -> int:
        of_keys = np.frombuffer(counts, "<u4")
        self._index.append(start + np.repeat(np.arange(len(of_keys)), of_keys))
        self._subkeys.append(columns[:2])  # type: ignore[arg-type]  # a slice of two
        self._values.append(columns[2:])  # type: ignore[arg-type]
        return len(of_keys)

    def entries(self, shape: Shape) -> Entries:
        index = np.concatenate([np.empty(0, dtype=np.intp), *self._index])
        if shape.kind is VariableKind.VALUE:
            subkeys: Encoded = np.empty((len(index), 0), dtype=np.uint8)
        else:
            subkeys = _joined(self._subkeys, shape.subkey_width)
        return Entries(index, subkeys, _joined(self._values, shape.value_width))


def _cuts(groups: Groups, sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of rows, each of one key group and within the bounds of a command; a larger row has one for itself."""
    if not len(groups):
        return
    rows = np.arange(len(groups))
    is_first = np.diff(groups, prepend=-1) != 0
    first = np.maximum.accumulate(np.where(is_first, rows, 0))
    before = np.cumsum(sizes) - sizes
    steps = np.stack([(rows - first) // _COMMAND_ROWS, (before - before[first]) // _COMMAND_BYTES])
    starts = np.flatnonzero(is_first | np.any(np.diff(steps, prepend=-1, axis=1) != 0, axis=0)).tolist()
    yield from zip(starts, [*starts[1:], len(groups)], strict=True)


def _fields(keys: Keys) -> Encoded:
    """Keys as Redis has them: eight bytes of hash, then the encoded key."""
    hashes = keys.hashes.astype(">i8").view(np.uint8).reshape(len(keys), _HASH_BYTES)
    if keys.keys.dtype == object:
        return np.asarray(to_objects(hashes) + keys.keys)
    return np.concatenate([hashes, keys.keys], axis=1)


def _keys_of(fields: Encoded, key_width: int | None) -> tuple[Hashes, Encoded]:
    if key_width is None:
        hashes = np.frombuffer(b"".join([field[:_HASH_BYTES] for field in fields]), ">i8")
        return hashes.astype(np.int64), from_objects([field[_HASH_BYTES:] for field in fields], None)
    heads = np.ascontiguousarray(fields[:, :_HASH_BYTES])
    return heads.view(">i8").ravel().astype(np.int64), np.ascontiguousarray(fields[:, _HASH_BYTES:])


def _field_width(key_width: int | None) -> int | None:
    return None if key_width is None else _HASH_BYTES + key_width


def _column(encoded: Encoded) -> tuple[bytes, bytes]:
    """The sizes of all values, and the values, as the scripts take them."""
    if encoded.dtype == object:
        return b":" + _sizes(encoded).astype("<u4").tobytes(), b"".join(encoded)
    return b"=" + struct.pack("<II", *encoded.shape), encoded.tobytes()


def _decoded(sizes: bytes, data: bytes, width: int | None) -> Encoded:
    lengths = np.frombuffer(sizes, "<u4")
    if width is not None:
        return np.frombuffer(data, np.uint8).reshape(len(lengths), width)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = (ends - lengths).tolist()
    return from_objects([data[start:end] for start, end in zip(starts, ends.tolist(), strict=True)], None)


def _joined(columns: Sequence[tuple[bytes, bytes]], width: int | None) -> Encoded:
    return _decoded(b"".join([sizes for sizes, _ in columns]), b"".join([data for _, data in columns]), width)


def _sizes(encoded: Encoded) -> npt.NDArray[np.int64]:
    if encoded.dtype == object:
        return np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.full(len(encoded), encoded.shape[1], dtype=np.int64)
