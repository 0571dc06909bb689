"""The store on disk: RocksDB, with one row per entry.

The key of a row is its key group, hash and encoded key, then the encoded sub-key: key groups are contiguous, and the
entries of a list or map follow each other. There is no write-ahead log, and what an earlier process left is removed:
the checkpoint is the truth, and this is a cache of it.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rocksdict

from anabranch.checkpoint import paths
from anabranch.core.errors import SettingsError
from anabranch.core.ids import checked_job_id
from anabranch.core.schemas import Op, StageSpec, VariableKind
from anabranch.worker.state.codec import from_objects, to_objects
from anabranch.worker.state.rows import Changes, Entries, Hashes, Keys, Rows, Shape
from anabranch.worker.stores import StorePlace

_BLOCK_CACHE_BYTES = 256 << 20
_WRITE_BUFFER_BYTES = 32 << 20
#: Rows per call of RocksDB: it holds Python's lock meanwhile, so that longer calls would stop all other threads.
_CALL_ROWS = 1 << 12
_BATCH_ROWS = 1 << 16
#: Values of more than this are not got only to see that they are there, if some of them are as large.
_LARGE_VALUE_BYTES = 1 << 12
_SAMPLE_ROWS = 16
#: The bytes of rows that are written, or scanned, at a time.
_CALL_BYTES = 8 << 20

_GROUP = slice(0, 2)
_HASH = slice(2, 10)
_LENGTH = slice(10, 14)  #: only of keys that vary in width


class RocksBackend:
    """See Backend: a folder for each job in the worker's directory."""

    def __init__(self, place: StorePlace) -> None:
        self._directory = place.directory

    def open(self, shape: Shape, job: str, stage: StageSpec, variable: str) -> RocksStore:
        return RocksStore(shape, self._folder(job) / paths.safe_name(stage.name) / paths.safe_name(variable))

    def close_job(self, job: str) -> None:
        shutil.rmtree(self._folder(job), ignore_errors=True)

    def wipe(self, job: str) -> None: ...

    def _folder(self, job: str) -> Path:
        if self._directory is None:
            raise SettingsError("The RocksDB store needs a directory for its files; name one.")
        return self._directory / checked_job_id(job)


class RocksStore:
    """See Store."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self._shape = shape
        self._of_values = shape.kind is VariableKind.VALUE
        self._directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        # Untyped: the stubs of rocksdict do not tell a batched get from a single one.
        self._db: Any = rocksdict.Rdict(str(directory), _options())
        self._db.set_write_options(_without_log())
        #: Entries of each key group: RocksDB itself only has an estimate.
        self._counts = np.zeros(shape.key_groups, dtype=np.int64)
        #: Held while the state changes. Readers never wait for it.
        self._changing = threading.Lock()

    def read(self, keys: Keys) -> Entries:
        # In the order of the rows on disk, because that is twice as fast.
        order = self._disk_order(keys.hashes)
        prefixes = self._prefixes(keys)[order].tolist()
        if self._of_values:
            found = self._get(prefixes)
            index = order[np.fromiter((value is not None for value in found), np.bool_, len(found))]
            subkeys: list[bytes] = [b""] * len(index)
            values: list[bytes] = [value for value in found if value is not None]
        else:
            rows = self._entries_after(prefixes)
            index = np.repeat(order, [len(entries) for entries in rows])
            skip = [len(prefix) for prefix in prefixes]
            subkeys = [row[n:] for n, entries in zip(skip, rows, strict=True) for row, _ in entries]
            values = [value for entries in rows for _, value in entries]
        encoded_subkeys = from_objects(subkeys, self._shape.subkey_width)
        return Entries(index, encoded_subkeys, from_objects(values, self._shape.value_width)).in_order()

    def apply(self, changes: Changes) -> None:
        with self._changing:
            cleared = changes.ops == Op.CLEAR
            self._clear(changes.keys_of(cleared))
            rest = changes.take(~cleared)
            rest = rest.take(self._disk_order(rest.hashes))
            groups = self._shape.groups_of(rest.hashes)
            rows = self._prefixes(Keys(rest.hashes, rest.keys))
            if not self._of_values:
                rows = rows + to_objects(rest.subkeys)
            self._write(groups, rows.tolist(), rest.ops == Op.PUT, to_objects(rest.values).tolist())

    def make_room(self, entries: int) -> None:
        """The database makes room by itself."""

    def snapshot(self, groups: Collection[int] | None) -> Iterator[Rows]:
        # An iterator sees the state as of its making. (Those of rocksdict's own snapshots do not.)
        return self._batches(self._db.iter(), _ranges(range(self._shape.key_groups) if groups is None else groups))

    def drop_groups(self, groups: Collection[int]) -> None:
        with self._changing:
            for first, end in _ranges(groups):
                self._db.delete_range(_group_prefix(first), _group_prefix(end))
                self._counts[first:end] = 0

    def rows(self, groups: Collection[int] | None = None) -> int:
        return int((self._counts if groups is None else self._counts[list(groups)]).sum())

    def size_bytes(self) -> int:
        names = ("rocksdb.total-sst-files-size", "rocksdb.cur-size-all-mem-tables")
        return sum(self._db.property_int_value(name) or 0 for name in names)

    def destroy(self) -> None:
        with self._changing, suppress(rocksdict.DbClosedError):
            self._db.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _get(self, rows: Sequence[bytes]) -> list[bytes | None]:
        values: list[bytes | None] = []
        for start in range(0, len(rows), _CALL_ROWS):
            values += self._db.get(rows[start : start + _CALL_ROWS])
        return values

    def _entries_after(self, prefixes: Sequence[bytes]) -> list[list[tuple[bytes, bytes]]]:
        """The rows that begin with each prefix. RocksDB has no call for many prefixes, hence the loop."""
        iterator, found = self._db.iter(), []
        for prefix in prefixes:
            entries: list[tuple[bytes, bytes]] = []
            iterator.seek(prefix)
            while iterator.valid() and (row := iterator.key()).startswith(prefix):
                entries.append((row, iterator.value()))
                iterator.next()
            found.append(entries)
        iterator.status()
        return found

    def _clear(self, keys: Keys) -> None:
        keys = keys.take(self._disk_order(keys.hashes))
        groups, rows = self._shape.groups_of(keys.hashes), self._prefixes(keys).tolist()
        if not self._of_values:
            entries = self._entries_after(rows)
            groups = np.repeat(groups, [len(of_key) for of_key in entries])
            rows = [row for of_key in entries for row, _ in of_key]
        self._write(groups, rows, np.zeros(len(rows), dtype=np.bool_), [b""] * len(rows))

    def _write(
        self,
        groups: npt.NDArray[Any],
        rows: Sequence[bytes],
        puts: npt.NDArray[np.bool_],
        values: Sequence[bytes],
    ) -> None:
        """Put or delete rows, and count them."""
        for part in _calls(values):
            there = self._are_there(rows[part])
            batch = rocksdict.WriteBatch(raw_mode=True)
            for row, put, value in zip(rows[part], puts[part].tolist(), values[part], strict=True):
                if put:
                    batch.put(row, value)
                else:
                    batch.delete(row)
            self._db.write(batch)
            np.add.at(self._counts, groups[part], puts[part].astype(np.int64) - there)

    def _are_there(self, rows: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        there = self._db.get(rows[:_SAMPLE_ROWS])
        rest = rows[_SAMPLE_ROWS:]
        if sum(len(value) for value in there if value is not None) > _LARGE_VALUE_BYTES * len(there):
            # To get them all at once is faster, and copies them.
            return np.array([*(value is not None for value in there), *(row in self._db for row in rest)], np.bool_)
        return np.array([value is not None for value in [*there, *self._db.get(rest)]], dtype=np.bool_)

    def _disk_order(self, hashes: Hashes) -> npt.NDArray[np.intp]:
        """Positions in the order of key group and hash, as far as 64 bits tell."""
        groups = self._shape.groups_of(hashes).astype(np.uint64)
        return np.argsort(groups << np.uint64(48) | hashes.view(np.uint64) >> np.uint64(16), kind="stable")

    def _prefixes(self, keys: Keys) -> npt.NDArray[np.object_]:
        """What the rows of each key begin with; no key's prefix begins with that of another."""
        width = self._shape.key_width
        head = [("group", ">u2"), ("hash", ">i8"), ("key", f"V{width}") if width else ("length", ">u4")]
        prefixes = np.empty(len(keys), dtype=np.dtype(head[:2] if width == 0 else head))
        prefixes["group"] = self._shape.groups_of(keys.hashes)
        prefixes["hash"] = keys.hashes
        if width:
            prefixes["key"] = np.ascontiguousarray(keys.keys).view(f"V{width}").ravel()
        elif width is None:
            prefixes["length"] = np.fromiter(map(len, keys.keys), np.uint32, len(keys))
        objects = to_objects(prefixes.view(np.uint8).reshape(len(keys), prefixes.itemsize))
        return objects if width is not None else objects + keys.keys

    def _batches(self, iterator: rocksdict.RdictIter, ranges: Sequence[tuple[int, int]]) -> Iterator[Rows]:
        rows: list[bytes] = []
        values: list[bytes] = []
        size = 0
        for first, end in ranges:
            iterator.seek(_group_prefix(first))
            end_prefix = _group_prefix(end)
            while iterator.valid() and (row := iterator.key()) < end_prefix:
                value = iterator.value()
                rows.append(row)
                values.append(value)
                size += len(row) + len(value)
                iterator.next()
                if len(rows) == _BATCH_ROWS or size >= _CALL_BYTES:
                    yield self._decoded(rows, values)
                    rows, values, size = [], [], 0
        iterator.status()
        if rows:
            yield self._decoded(rows, values)

    def _decoded(self, rows: Sequence[bytes], values: Sequence[bytes]) -> Rows:
        """Take row keys apart: by row, as an iterator gives them by row."""
        hashes = np.frombuffer(b"".join([row[_HASH] for row in rows]), ">i8").astype(np.int64)
        width = self._shape.key_width
        if width is None:
            starts = [_LENGTH.stop] * len(rows)
            ends = [_LENGTH.stop + int.from_bytes(row[_LENGTH], "big") for row in rows]
        else:
            starts, ends = [_HASH.stop] * len(rows), [_HASH.stop + width] * len(rows)
        keys = [row[start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
        subkeys = [row[end:] for row, end in zip(rows, ends, strict=True)]
        return Rows(
            hashes,
            from_objects(keys, width),
            from_objects(subkeys, self._shape.subkey_width),
            from_objects(values, self._shape.value_width),
        )


def _calls(values: Sequence[bytes]) -> Iterator[slice]:
    """The rows with these values in pieces, each for one call of RocksDB."""
    start = size = 0
    for end, value in enumerate(values):
        if end > start and (end - start == _CALL_ROWS or size + len(value) > _CALL_BYTES):
            yield slice(start, end)
            start, size = end, 0
        size += len(value)
    if values:
        yield slice(start, len(values))


def _group_prefix(group: int) -> bytes:
    return group.to_bytes(_GROUP.stop, "big")


def _ranges(groups: Collection[int]) -> list[tuple[int, int]]:
    """The key groups as ranges, each with its end excluded, in order."""
    ranges: list[tuple[int, int]] = []
    for group in sorted(set(groups)):
        if ranges and ranges[-1][1] == group:
            ranges[-1] = ranges[-1][0], group + 1
        else:
            ranges.append((group, group + 1))
    return ranges


@cache
def _block_cache() -> rocksdict.Cache:
    """One for all databases of the process, so that their number does not multiply the memory."""
    return rocksdict.Cache(_BLOCK_CACHE_BYTES)


def _options() -> rocksdict.Options:
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(_block_cache())
    blocks.set_bloom_filter(10, False)
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    blocks.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
    blocks.set_format_version(5)
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_memtable_whole_key_filtering(True)
    options.set_memtable_prefix_bloom_ratio(0.05)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    return options


def _without_log() -> rocksdict.WriteOptions:
    options = rocksdict.WriteOptions()
    options.disable_wal = True  # type: ignore[method-assign, assignment]  # the stub takes it for a method
    return options
