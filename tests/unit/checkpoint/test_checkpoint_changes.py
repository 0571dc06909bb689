from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.checkpoint import datafiles as checkpoint_changes
from anabranch.checkpoint.datafiles import read_changes, write_changes
from anabranch.checkpoint.paths import change_file, variable_folder
from anabranch.checkpoint.storage import Storage
from anabranch.core import gather
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch, Generation, Run, StageNumber, WorkerId
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH, Layout, Op, StageSpec, VariableKind, VariableSpec
from anabranch.core.state_files import ChangeFile

GROUPS = 64


def path_of(epoch: int = 0, worker: str = "w1", variable: str = "value") -> str:
    return change_file(
        "stage2", variable, epoch=Epoch(epoch), generation=Generation(1), run=Run(0), worker=WorkerId(worker)
    )


def write(storage: Storage, layout: Layout, changes: pa.Table, path: str | None = None) -> ChangeFile:
    path = path or path_of()
    rows, size, checksum = write_changes(storage, path, layout, GROUPS, changes)
    return ChangeFile(StageNumber(2), layout.variable.name, WorkerId("w1"), path, rows, size, checksum)


def value_changes(layout: Layout, hashes: list[int] | np.ndarray) -> pa.Table:
    """One change per hash; the values tell its place in the input, and every third one deletes."""
    places = np.arange(len(hashes))
    deletes = pa.array(places % 3 == 2)
    return pa.table(
        [
            pa.array(hashes, pa.int64()),
            pa.array(np.where(places % 3 == 2, Op.DELETE, Op.PUT), pa.int8()),
            pa.array(places * 7, pa.int64()),
            pa.array(places, pa.int64(), mask=deletes.to_numpy(zero_copy_only=False)),
            pa.array(places * 2, pa.int64(), mask=deletes.to_numpy(zero_copy_only=False)),
        ],
        schema=layout.changes,
    )


def random_hashes(rows: int) -> np.ndarray:
    return np.random.default_rng(7).integers(-(2**63), 2**63 - 1, rows)


def expected(changes: pa.Table, groups: set[int] | None) -> pa.Table:
    """What reading should give, row by row: by group, otherwise in the order of writing."""
    of_row = [hash_ % GROUPS for hash_ in changes.column(HASH).to_pylist()]
    order = sorted(range(len(of_row)), key=lambda row: of_row[row])
    return changes.take(pa.array([row for row in order if groups is None or of_row[row] in groups], pa.int64()))


def test_changes_come_back_by_key_group_and_otherwise_in_order(storage: Storage, stage: StageSpec) -> None:
    layout = stage.layouts["value"]
    changes = value_changes(layout, random_hashes(5000))
    file = write(storage, layout, changes)
    back = read_changes(storage, file, layout, None)
    assert back.schema.equals(layout.changes)
    assert back.equals(expected(changes, None))
    assert file.rows == 5000
    assert file.bytes == Path(storage.full_path(file.path)).stat().st_size
    assert file.checksum.startswith("xxh3:")


@pytest.mark.parametrize("groups", [set(), {0}, {63}, {5, 6, 40}, set(range(64))])
def test_only_the_rows_of_the_wanted_key_groups_come_back(storage: Storage, stage: StageSpec, groups: set[int]) -> None:
    layout = stage.layouts["value"]
    changes = value_changes(layout, random_hashes(3000))
    back = read_changes(storage, write(storage, layout, changes), layout, groups)
    assert back.schema.equals(layout.changes)
    assert back.equals(expected(changes, groups))


def test_row_groups_without_wanted_key_groups_are_not_read(
    storage: Storage, stage: StageSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = stage.layouts["value"]
    changes = value_changes(layout, random_hashes(300_000))
    file = write(storage, layout, changes)
    asked: list[list[int]] = []
    read_row_groups = pq.ParquetFile.read_row_groups

    def record(self: pq.ParquetFile, row_groups: list[int], *args: object, **kwargs: object) -> pa.Table:
        asked.append(row_groups)
        return read_row_groups(self, row_groups, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", record)
    for group in (0, 63):
        assert read_changes(storage, file, layout, [group]).equals(expected(changes, {group}))
    assert asked == [[0], [4]]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hashes=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5), max_size=60),
    groups=st.none() | st.sets(st.integers(0, GROUPS - 1)),
)
def test_whatever_is_written_comes_back(
    tmp_path: Path, stage: StageSpec, hashes: list[int], groups: set[int] | None
) -> None:
    storage, layout = Storage(str(tmp_path), durable=False), stage.layouts["value"]
    changes = value_changes(layout, hashes)
    assert read_changes(storage, write(storage, layout, changes), layout, groups).equals(expected(changes, groups))


def test_the_order_of_one_key_stays_so_that_a_clear_comes_before_what_follows(
    storage: Storage, stage: StageSpec
) -> None:
    layout = stage.layouts["visits"]
    now = datetime(2026, 1, 1, tzinfo=UTC)
    changes = pa.Table.from_pylist(
        [
            {"_hash": 70, "_op": Op.PUT, "user": 1, "page": "x", "at": now},
            {"_hash": 5, "_op": Op.CLEAR, "user": 2},
            {"_hash": 5, "_op": Op.PUT, "user": 2, "page": "b", "at": now},
            {"_hash": 5, "_op": Op.DELETE, "user": 2, "page": "a"},
        ],
        schema=layout.changes,
    )
    back = read_changes(storage, write(storage, layout, changes), layout, {5})
    assert back.column("_op").to_pylist() == [Op.CLEAR, Op.PUT, Op.DELETE]
    assert back.column("page").to_pylist() == [None, "b", "a"]


def test_many_chunks_are_written_as_one(storage: Storage, stage: StageSpec) -> None:
    layout = stage.layouts["value"]
    whole = value_changes(layout, random_hashes(1000))
    pieces = pa.concat_tables([whole.slice(at, 100) for at in range(0, 1000, 100)])
    assert read_changes(storage, write(storage, layout, pieces), layout, None).equals(expected(whole, None))


def test_rich_types_survive(storage: Storage) -> None:
    value = pa.schema(
        [
            ("when", pa.timestamp("us", tz="Europe/Berlin")),
            ("local", pa.timestamp("us")),
            ("price", pa.decimal128(20, 4)),
            ("tags", pa.list_(pa.string())),
            ("by_name", pa.map_(pa.string(), pa.int32())),
            ("inner", pa.struct([pa.field("x", pa.int32(), nullable=False), ("y", pa.list_(pa.float64()))])),
            ("raw", pa.binary()),
            ("day", pa.date32()),
            ("took", pa.duration("us")),
            ("none", pa.null()),
        ]
    )
    key = pa.schema([("window", pa.struct([("start", pa.timestamp("us")), ("end", pa.timestamp("us"))]))])
    layout = Layout(key, VariableSpec("v", VariableKind.VALUE, value))
    row = {
        "_op": Op.PUT,
        "window": {"start": datetime(2026, 1, 1), "end": datetime(2026, 1, 2)},
        "when": datetime(2026, 7, 1, tzinfo=UTC),
        "local": datetime(2026, 7, 1),
        "tags": ["a", None],
        "by_name": [("a", 1)],
        "inner": {"x": 1, "y": [0.5]},
        "raw": b"\0\xff",
    }
    rows = [row | {"_hash": hash_} for hash_ in (3, 2, 1)]
    rows.append({"_hash": 1, "_op": Op.DELETE, "window": row["window"]})
    changes = pa.Table.from_pylist(rows, schema=layout.changes)
    back = read_changes(storage, write(storage, layout, changes), layout, None)
    assert back.schema.equals(layout.changes)
    assert back.equals(expected(changes, None))


def test_a_query_that_now_has_another_time_zone_or_nullability_reads_the_same_rows(storage: Storage) -> None:
    def layout_of(zone: str, *, nullable: bool) -> Layout:
        inner = pa.struct([pa.field("x", pa.int32(), nullable=nullable)])
        value = pa.schema([("at", pa.timestamp("us", tz=zone)), pa.field("inner", inner, nullable=nullable)])
        return Layout(pa.schema([("k", pa.int64())]), VariableSpec("v", VariableKind.VALUE, value))

    before, now = layout_of("UTC", nullable=True), layout_of("Asia/Tokyo", nullable=False)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        {"_hash": 1, "_op": Op.PUT, "k": 1, "at": at, "inner": {"x": 1}},
        {"_hash": 1, "_op": Op.DELETE, "k": 2},
    ]
    file = write(storage, before, pa.Table.from_pylist(rows, schema=before.changes))
    back = read_changes(storage, file, now, None)
    assert back.schema.equals(now.changes)
    assert back.column("at").to_pylist() == [at, None]
    assert back.column("inner").to_pylist() == [{"x": 1}, None]


def test_user_fields_called_like_those_of_anabranch_survive(storage: Storage) -> None:
    value = pa.schema([("_group", pa.string()), ("_op", pa.string())])
    layout = Layout(pa.schema([("k", pa.int64())]), VariableSpec("v", VariableKind.VALUE, value))
    columns = [
        pa.array([2, 1]),
        pa.array([0, 0], pa.int8()),
        pa.array([5, 6]),
        pa.array(["a", "b"]),
        pa.array(["c", "d"]),
    ]
    changes = pa.table(columns, schema=layout.changes)
    back = read_changes(storage, write(storage, layout, changes), layout, {1})
    assert back.schema.equals(layout.changes)
    assert [column.to_pylist() for column in back.columns] == [[1], [0], [6], ["b"], ["d"]]


def test_changes_with_other_columns_are_not_written(storage: Storage, stage: StageSpec) -> None:
    changes = value_changes(stage.layouts["value"], [1, 2])
    with pytest.raises(ValueError, match="instead of"):
        write_changes(storage, path_of(), stage.layouts["seen"], GROUPS, changes)
    assert storage.read_if_present(path_of()) is None


def test_state_that_parquet_cannot_hold_is_an_error_that_names_it(storage: Storage) -> None:
    value = pa.schema([("gap", pa.month_day_nano_interval())])
    layout = Layout(pa.schema([("k", pa.int64())]), VariableSpec("v", VariableKind.VALUE, value))
    with pytest.raises(CheckpointError, match=r"as Parquet: .*interval.*Use other types"):
        write(storage, layout, layout.changes.empty_table())


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("damage", "what"), [(flip_a_byte, "damaged"), (cut, "damaged"), (Path.unlink, "missing")])
@pytest.mark.parametrize("groups", [None, {1}])
def test_a_damaged_or_missing_file_is_an_error_that_names_it(
    storage: Storage, stage: StageSpec, damage: object, what: str, groups: set[int] | None
) -> None:
    layout = stage.layouts["value"]
    file = write(storage, layout, value_changes(layout, random_hashes(1000)))
    path = Path(storage.full_path(file.path))
    damage(path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=rf"{path} is {what}.*Restore"):
        read_changes(storage, file, layout, groups)


def test_a_file_of_another_state_variable_is_noticed(storage: Storage, stage: StageSpec) -> None:
    file = write(storage, stage.layouts["value"], value_changes(stage.layouts["value"], [1]))
    with pytest.raises(CheckpointError, match=rf"{file.path} does not fit .*its first columns are .*count.*_position"):
        read_changes(storage, file, stage.layouts["seen"], None)
    texts = VariableSpec("value", VariableKind.VALUE, pa.schema([("count", pa.string()), ("total", pa.string())]))
    with pytest.raises(CheckpointError, match="column count cannot change from bigint to string"):
        read_changes(storage, file, Layout(stage.key, texts), None)


def test_duckdb_reads_the_whole_history_of_a_variable_with_the_names_of_the_user(
    storage: Storage, stage: StageSpec
) -> None:
    layout = stage.layouts["value"]
    for epoch, worker in [(0, "w1"), (0, "host:9000"), (12, "w1")]:
        write(storage, layout, value_changes(layout, random_hashes(100)), path_of(epoch, worker))
    write(storage, stage.layouts["seen"], stage.layouts["seen"].changes.empty_table(), path_of(0, "w1", "seen"))
    Path(storage.full_path(path_of())).with_name(".half.parquet.0.tmp").write_bytes(b"an interrupted write")
    history = f"read_parquet('{storage.full_path(variable_folder('stage2', 'value'))}/*/*.parquet')"

    with duckdb.connect() as database:
        described = database.sql(f"SELECT * FROM {history} LIMIT 0")
        names = described.columns
        assert names[:6] == ["_group", "_hash", "_op", "user", "count", "total"]
        assert [str(kind) for kind in described.types[:6]] == ["INTEGER", "BIGINT", "TINYINT", *["BIGINT"] * 3]
        totals = database.sql(
            f'SELECT epoch::INT, count(*), sum("count"), sum(total) FROM {history} GROUP BY 1 ORDER BY 1'
        )
        one = sum(place for place in range(100) if place % 3 != 2)
        assert totals.fetchall() == [(0, 200, 2 * one, 4 * one), (12, 100, one, 2 * one)]
        hashes = database.sql(f"SELECT _hash, _group FROM {history}").fetchnumpy()
        np.testing.assert_array_equal(key_groups_of(hashes["_hash"], GROUPS), hashes["_group"])


def test_large_changes_are_written_part_by_part(
    storage: Storage, stage: StageSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = stage.layouts["value"]
    changes = pa.concat_tables([value_changes(layout, hashes) for hashes in np.split(random_hashes(6000), 3)])
    whole = read_changes(storage, write(storage, layout, changes), layout, None)
    chunks: list[int] = []

    def write_from(self: Storage, path: str, content: Iterable[bytes]) -> None:
        parts = list(content)
        chunks.extend(map(len, parts))
        self.write(path, b"".join(parts))

    monkeypatch.setattr(Storage, "write_from", write_from)
    monkeypatch.setattr(gather, "PART_BYTES", changes.nbytes // 10)
    monkeypatch.setattr(checkpoint_changes, "PART_BYTES", changes.nbytes // 10)
    file = write(storage, layout, changes, path_of(epoch=1))
    assert read_changes(storage, file, layout, None).equals(whole)
    assert read_changes(storage, file, layout, {5, 40}).equals(expected(changes, {5, 40}))
    assert file.bytes == sum(chunks) == Path(storage.full_path(file.path)).stat().st_size
    assert len(chunks) >= 10
    assert max(chunks) < sum(chunks) / 4, "nobody holds all of the file"


def test_nothing_is_left_of_a_file_that_could_not_be_written(storage: Storage) -> None:
    def failing() -> Iterator[bytes]:
        yield b"begun"
        raise CheckpointError("no more")

    with pytest.raises(CheckpointError, match=r"^no more$"):
        storage.write_from(path_of(), failing())
    assert list(storage.walk("")) == []
