"""The commands about checkpoints: what they say is what is there, to people, to programs, and by exit code."""

import json
import os
import re
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.checkpoint import paths
from anabranch.checkpoint.cleanup import clean_up
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.manifests import read_manifest, read_snapshot, snapshot_epochs
from anabranch.checkpoint.savepoints import read_savepoint
from anabranch.checkpoint.statefiles import state_files
from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.verify import verify
from anabranch.cli import main
from anabranch.cli.checkpoint import epoch_ranges
from anabranch.control.epochs import savepoints
from anabranch.core.ids import Epoch, Generation, StageNumber
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.worker.compaction import compact
from support.written_checkpoint import WrittenCheckpoint, entries_of

FIRST = Generation(1)
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.fixture
def stage() -> StageSpec:
    """A stage with one state variable of each kind; a name in brackets is not to be taken for markup."""
    at = pa.schema([("at", pa.timestamp("us", tz="UTC"))])
    return StageSpec(
        StageNumber(2),
        "stage2",
        pa.schema([("user", pa.int64())]),
        (
            VariableSpec("aggregates", VariableKind.VALUE, pa.schema([("count", pa.int64()), ("total", pa.int64())])),
            VariableSpec("[red]seen", VariableKind.LIST, pa.schema([("page", pa.string())])),
            VariableSpec("visits", VariableKind.MAP, at, map_key=pa.schema([("page", pa.string())])),
        ),
    )


@pytest.fixture
def written(tmp_path: Path, stage: StageSpec, monkeypatch: pytest.MonkeyPatch) -> WrittenCheckpoint:
    """Epochs 0 to 13 in ``checkpoint`` of the working directory, of which Spark committed 12, and a snapshot of 3."""
    monkeypatch.chdir(tmp_path)
    written = WrittenCheckpoint(Storage("checkpoint", durable=False), stage)
    claim_generation(written.storage, {"savepoint": "elsewhere"})
    for epoch in range(14):
        go_on(written, epoch)
    written.storage.delete("commits/13")
    compact(written.storage, Epoch(3), generation=FIRST)
    return written


def go_on(written: WrittenCheckpoint, epoch: int) -> None:
    """One more epoch, which sets, changes and deletes state."""
    written.write(
        epoch,
        {
            "aggregates": [(0, key, None, (epoch, key)) for key in range(epoch, epoch + 5)],
            "[red]seen": [(0, epoch % 3, epoch, f"page {epoch}"), (1, (epoch + 1) % 3, epoch - 2, None)],
            "visits": [(2, epoch % 4, None, None), (0, epoch % 5, "home", epoch)],
        },
    )
    written.storage.write(f"offsets/{epoch}", b"v1\n{}")
    written.commit_in_spark(epoch)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line, and gives its exit code, standard output and standard error."""

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["anabranch", *shlex.split(line)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, captured.out, captured.err

    return run


Run = Callable[[str], tuple[int, str, str]]


def done(run: Run, line: str) -> str:
    code, out, err = run(line)
    assert (code, err) == (0, ""), err
    return out


def told(run: Run, line: str) -> Any:
    return json.loads(done(run, f"{line} --json"))


def refused(run: Run, line: str) -> str:
    code, out, err = run(line)
    assert (code, out) == (1, "")
    assert err.startswith("Error: ")
    return err


def spoil(storage: Storage, path: str) -> None:
    storage.write(path, storage.read(path)[:-9] + b"123456789")


def test_list_shows_every_epoch_and_snapshot_with_its_size(written: WrittenCheckpoint, run: Run) -> None:
    out = done(run, "checkpoint list checkpoint")
    assert "Spark committed epoch 12 last" in out
    rows = [line.split() for line in out.splitlines()]
    for epoch in range(14):
        manifest = read_manifest(written.storage, Epoch(epoch))
        changes = sum(file.rows for file in manifest.files)
        status = ["committed"] if epoch <= 12 else ["not", "yet"]
        row = next(row for row in rows if row[: 1 + len(status)] == [str(epoch), *status])
        # Generation, run, route and files; then the size, a number and a unit; then the changes.
        assert row[1 + len(status) :][:4] == ["1", str(epoch), "0", str(len(manifest.files))]
        assert row[-1] == str(changes)
    snapshot = read_snapshot(written.storage, Epoch(3))
    last = next(row for row in reversed(rows) if row[:1] == ["3"])
    assert last[-1] == str(sum(file.rows for file in snapshot.files))


def test_list_for_programs(written: WrittenCheckpoint, run: Run) -> None:
    document = told(run, "checkpoint list checkpoint")
    assert (document["committed"], document["job_id"], document["stages"]) == (12, "job", {"2": "stage2"})
    assert [each["epoch"] for each in document["epochs"]] == list(range(14))
    assert [each["epoch"] for each in document["snapshots"]] == [3]
    assert sum(document["sizes"].values()) == sum(size for _, size, _ in written.storage.walk(paths.ROOT))


def test_list_goes_on_past_a_damaged_document_and_names_it(written: WrittenCheckpoint, run: Run) -> None:
    path = paths.manifest_file(Epoch(7), FIRST)
    spoil(written.storage, path)
    code, out, err = run("checkpoint list checkpoint --json")
    assert (code, [each["epoch"] for each in json.loads(out)["epochs"]]) == (0, [*range(7), *range(8, 14)])
    assert err.startswith("Damaged: ")
    assert path in err


def test_show_describes_the_job_and_names_the_files_of_an_epoch(written: WrittenCheckpoint, run: Run) -> None:
    out = done(run, "checkpoint show checkpoint --epoch 5")
    assert "16 key groups; state as of epoch 5" in out
    assert "Stage 2, stage2: key (user bigint)" in out
    assert "value of (count bigint, total bigint)" in out
    assert "map from (page string) to (at timestamp)" in out
    assert "[red]seen" in out
    files = state_files(written.storage, Epoch(5)).data_files
    assert {*re.findall(r"anabranch/\S+\.parquet", out)} == {file.path for file in files}


def test_show_is_of_the_epoch_that_spark_committed_last_unless_told(written: WrittenCheckpoint, run: Run) -> None:
    document = told(run, "checkpoint show checkpoint")
    files = state_files(written.storage, Epoch(12))
    assert document["epoch"] == 12
    assert [file["path"] for file in document["snapshot_files"]] == [file.path for file in files.snapshot_files]
    assert [file["path"] for file in document["change_files"]] == [file.path for file in files.change_files]


def test_verify_finds_nothing_wrong_with_an_intact_checkpoint(written: WrittenCheckpoint, run: Run) -> None:
    assert "The newest whole epoch is 13; Spark committed epoch 12 last: the query can resume." in done(
        run, f"checkpoint verify {written.storage.location}"
    )


def test_verify_names_damaged_files_and_the_newest_whole_epoch(written: WrittenCheckpoint, run: Run) -> None:
    spoiled, missing = (
        next(file.path for file in read_manifest(written.storage, Epoch(epoch)).files if file.rows) for epoch in (9, 11)
    )
    spoil(written.storage, spoiled)
    written.storage.delete(missing)
    code, out, _ = run("checkpoint verify checkpoint")
    flat = "".join(out.split())
    assert (code, spoiled in flat, missing in flat) == (1, True, True)
    assert "The newest whole epoch is 8; Spark committed epoch 12 last: the query cannot resume" in out
    code, out, _ = run("checkpoint verify checkpoint --json")
    document = json.loads(out)
    assert (code, document["newest_whole"], document["can_resume"]) == (1, 8, False)
    assert {problem["path"]: problem["epochs"] for problem in document["problems"]} == {
        spoiled: [9, 10, 11, 12, 13],
        missing: [11, 12, 13],
    }


def test_verify_reports_a_job_that_cannot_be_read(written: WrittenCheckpoint, run: Run) -> None:
    written.storage.delete(paths.JOB)
    code, out, _ = run("checkpoint verify checkpoint --json")
    document = json.loads(out)
    assert (code, document["can_resume"]) == (1, False)
    assert [problem["path"] for problem in document["problems"]] == [paths.JOB]


def test_damage_before_the_snapshot_does_not_keep_the_query_from_resuming(written: WrittenCheckpoint, run: Run) -> None:
    spoil(written.storage, paths.manifest_file(Epoch(1), FIRST))
    code, out, _ = run("checkpoint verify checkpoint")
    assert (code, "Spark committed epoch 12 last: the query can resume." in out) == (1, True)


@pytest.mark.parametrize("epoch", [0, 8, 12])
def test_an_export_is_the_state_of_the_epoch(written: WrittenCheckpoint, run: Run, epoch: int) -> None:
    document = told(run, f"checkpoint export checkpoint exported --epoch {epoch}")
    for variable, layout in written.stage.layouts.items():
        name = f"stage2/{paths.safe_name(variable)}.parquet"
        rows = pq.read_table(Path("exported") / name)
        assert entries_of(layout, rows) == written.states[epoch][variable]
        assert document["rows"][name] == rows.num_rows


def test_an_export_overwrites_nothing(written: WrittenCheckpoint, run: Run) -> None:  # noqa: ARG001
    done(run, "checkpoint export checkpoint exported")
    assert "is not empty. Name an empty or new one." in refused(run, "checkpoint export checkpoint exported")


def test_compact_writes_a_snapshot_of_the_committed_epoch(written: WrittenCheckpoint, run: Run) -> None:
    document = told(run, "checkpoint compact checkpoint")
    assert snapshot_epochs(written.storage) == [3, 12]
    assert document["rows"] == sum(len(entries) for entries in written.states[12].values())
    assert verify(written.storage).problems == ()


def test_clean_keeps_the_newest_epochs_restorable(written: WrittenCheckpoint, run: Run) -> None:
    done(run, "checkpoint compact checkpoint")
    document = told(run, "checkpoint clean checkpoint --keep-epochs 1")
    assert document["retained"] == [12, 13]
    report = verify(written.storage)
    assert (report.problems, report.epochs) == ((), (12, 13))
    left = {path for path, _, _ in written.storage.walk(paths.ROOT)}
    assert left.isdisjoint(document["deleted"]["data"])


def test_a_dry_run_says_what_would_go_and_leaves_it(written: WrittenCheckpoint, run: Run) -> None:
    compact(written.storage, Epoch(12), generation=FIRST)
    before = list(written.storage.walk(""))
    planned = told(run, "checkpoint clean checkpoint --keep-epochs 2 --dry-run")
    lines = done(run, "checkpoint clean checkpoint --keep-epochs 2 --dry-run").splitlines()
    assert list(written.storage.walk("")) == before
    done_ = told(run, "checkpoint clean checkpoint --keep-epochs 2")
    assert {**planned, "dry_run": False} == done_
    gone = {path for path, *_ in before} - {path for path, *_ in written.storage.walk("")}
    assert gone == {path for paths_ in planned["deleted"].values() for path in paths_}
    assert gone == set(lines[:-2]) != set()
    assert lines[-1] == "Epochs that can be restored: 11 to 13."


def test_young_epochs_stay_as_well(written: WrittenCheckpoint, run: Run) -> None:
    compact(written.storage, Epoch(12), generation=FIRST)
    document = told(run, "checkpoint clean checkpoint --keep-epochs 1 --keep-seconds 3600")
    assert (document["retained"], document["bytes"]) == (list(range(14)), 0)


@pytest.mark.parametrize("command", ["compact", "clean --keep-epochs 1"])
def test_a_job_that_runs_on_this_machine_is_left_alone(written: WrittenCheckpoint, run: Run, command: str) -> None:
    claim_generation(written.storage, {"host": socket.gethostname(), "pid": os.getpid()})
    before = list(written.storage.walk(""))
    assert f"running, in process {os.getpid()} of this machine" in refused(run, f"checkpoint {command} checkpoint")
    assert list(written.storage.walk("")) == before
    done(run, f"checkpoint {command} checkpoint --force")
    claim_generation(written.storage, {"host": "another", "pid": os.getpid()})
    done(run, f"checkpoint {command} checkpoint")


def test_a_savepoint_is_a_checkpoint_with_the_same_state(written: WrittenCheckpoint, run: Run, tmp_path: Path) -> None:
    document = told(run, "savepoint checkpoint saved")
    assert (document["epoch"], document["origin"]) == (12, written.storage.location)
    assert document["target"] == str(tmp_path / "saved")
    assert read_savepoint(Storage("saved")).epoch == 12
    assert "the query can resume" in done(run, "checkpoint verify saved")
    done(run, "checkpoint export saved exported")
    rows = pq.read_table("exported/stage2/visits.parquet")
    assert entries_of(written.stage.layouts["visits"], rows) == written.states[12]["visits"]
    assert "Name another place" in refused(run, "savepoint checkpoint saved")
    assert "is the checkpoint itself" in refused(run, "savepoint checkpoint ./checkpoint")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Epoch], None]], list[Epoch]]:
    """Lets something happen between the choice of a savepoint's epoch and the first copy; lists those epochs."""
    begin, begun = savepoints.begin_savepoint, list[Epoch]()

    def interrupted(happens: Callable[[Epoch], None]) -> list[Epoch]:
        def begin_late(spark: Storage, target: Storage, epoch: Epoch) -> None:
            begun.append(epoch)
            happens(epoch)
            begin(spark, target, epoch)

        monkeypatch.setattr(savepoints, "begin_savepoint", begin_late)
        return begun

    return interrupted


Interrupted = Callable[[Callable[[Epoch], None]], list[Epoch]]


def test_a_savepoint_is_taken_again_if_the_job_cleans_up_meanwhile(
    written: WrittenCheckpoint, run: Run, interrupted: Interrupted
) -> None:
    def job_goes_on(epoch: Epoch) -> None:
        if epoch < 14:
            now = Epoch(epoch + 1)
            go_on(written, now)
            compact(written.storage, now, generation=FIRST)
            clean_up(written.storage, committed=now, keep_epochs=1, keep_seconds=0, now=9e9, min_age_s=0)
            written.storage.delete(f"commits/{epoch}")

    begun = interrupted(job_goes_on)
    assert told(run, "savepoint checkpoint saved")["epoch"] == 14
    assert begun == [12, 13, 14]
    assert verify(Storage("saved")).problems == ()


def test_a_savepoint_is_given_up_after_three_tries(
    written: WrittenCheckpoint, run: Run, interrupted: Interrupted
) -> None:
    def job_goes_on(epoch: Epoch) -> None:
        go_on(written, epoch + 1)
        written.storage.delete(f"offsets/{epoch}")

    begun = interrupted(job_goes_on)
    assert "The job went on meanwhile" in refused(run, "savepoint checkpoint saved")
    assert begun == [12, 13, 14]


def test_a_savepoint_of_a_damaged_checkpoint_is_not_tried_again(
    written: WrittenCheckpoint, run: Run, interrupted: Interrupted
) -> None:
    path = paths.manifest_file(Epoch(9), FIRST)
    begun = interrupted(lambda _: spoil(written.storage, path))
    assert path in refused(run, "savepoint checkpoint saved")
    assert begun == [12]


def test_state_with_a_place_of_its_own_is_found_there(written: WrittenCheckpoint, run: Run) -> None:
    spark = Storage("spark", durable=False)
    for folder in ("offsets", "commits"):
        for name in written.storage.list_names(folder):
            written.storage.copy_to(f"{folder}/{name}", spark, f"{folder}/{name}")
            written.storage.delete(f"{folder}/{name}")
    place = "spark --state-location checkpoint"
    assert told(run, f"checkpoint list {place}")["committed"] == 12
    assert told(run, f"checkpoint show {place}")["epoch"] == 12
    assert told(run, f"checkpoint verify {place}")["can_resume"] is True
    assert told(run, f"checkpoint export {place} exported")["epoch"] == 12
    assert told(run, f"savepoint {place} saved")["epoch"] == 12
    assert told(run, f"checkpoint compact {place}")["epoch"] == 12
    assert told(run, f"checkpoint clean {place} --keep-epochs 1")["retained"] == [12, 13]
    assert "name it with --state-location" in refused(run, "checkpoint show spark")
    assert "is the checkpoint itself" in refused(run, f"savepoint {place} spark")
    spark.write("commits/20", b"v1\n{}")
    code, out, _ = run(f"checkpoint verify {place}")
    assert (code, "Spark committed epoch 20, which has neither" in out) == (1, True)


@pytest.mark.parametrize("command", ["list", "show", "verify", "compact", "clean"])
def test_a_folder_that_is_no_checkpoint_is_refused_and_not_made(
    run: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is not a checkpoint of Anabranch" in refused(run, f"checkpoint {command} elsewhere")
    assert "is not a checkpoint of Anabranch" in refused(run, f"checkpoint {command} . --state-location elsewhere")
    assert not list(tmp_path.iterdir())


def test_an_epoch_that_is_not_there_is_refused_with_those_that_are(written: WrittenCheckpoint, run: Run) -> None:
    assert "it has the epochs 0 to 13." in refused(run, "checkpoint show checkpoint --epoch 99")
    for epoch in range(13):
        written.storage.delete(f"commits/{epoch}")
    assert "Spark has not committed an epoch" in refused(run, "checkpoint show checkpoint")
    assert "Wait for its first epoch" in refused(run, "savepoint checkpoint saved")


def test_wrong_usage_has_an_exit_code_of_its_own(written: WrittenCheckpoint, run: Run) -> None:  # noqa: ARG001
    for line in ("checkpoint show", "checkpoint clean checkpoint --keep-epochs 0", "savepoint checkpoint"):
        assert run(line)[0] == 2


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_each_epoch_once_and_no_other(epochs: set[int]) -> None:
    text = epoch_ranges(sorted(epochs))
    named: list[int] = []
    for part in text.split(", ") if text != "none" else ():
        first, _, last = part.partition(" to ")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(epochs)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_commands_and_queries_of_the_page_do_what_it_says(written: WrittenCheckpoint, run: Run) -> None:
    for line in "".join(blocks("sh")).splitlines():
        done(run, line.removeprefix("anabranch "))
    exported, snapshot, changes = (duckdb.sql(query).fetchall() for query in blocks("sql"))
    state = {(user, None): (count, total) for user, count, total in exported}
    assert state == written.states[12]["aggregates"]
    # In a folder such as epoch=12, the epoch is a column too.
    assert {(row[0], None): row[1:3] for row in snapshot} == state
    assert {int(epoch): puts for epoch, puts in changes} == dict.fromkeys(range(14), 5)
