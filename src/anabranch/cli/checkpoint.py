"""The commands about checkpoints: ``anabranch checkpoint …`` and ``anabranch savepoint``.

Tables are for people, ``--json`` is for programs. Exit codes: 0 is done, 1 is failed or damaged, 2 is wrong usage.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from anabranch.checkpoint import paths
from anabranch.checkpoint.cleanup import clean_up
from anabranch.checkpoint.evolution import schema_in_words
from anabranch.checkpoint.generations import latest_generation
from anabranch.checkpoint.job import JobDescription, read_job
from anabranch.checkpoint.rewind import rewind as rewind_to
from anabranch.checkpoint.savepoints import Savepoint
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.verify import DataFile, Report, VariableSize, describe
from anabranch.cli.output import AsJson, table, tell
from anabranch.cli.places import (
    FoundCheckpoint,
    check_not_running,
    chosen_epoch,
    epoch_ranges,
    find,
    verified,
    while_it_runs,
)
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH, Epoch
from anabranch.core.schemas import VariableKind, VariableSpec
from anabranch.core.settings import Settings
from anabranch.core.state_files import ChangeFile

#: Data that no document names may belong to a snapshot that somebody is writing, for so long.
_ORPHAN_AGE_S = 3600.0
#: How often a savepoint is tried on a checkpoint that changes meanwhile.
_SAVEPOINT_TRIES = 3

Checkpoint = Annotated[str, typer.Argument(help="The checkpoint, or a savepoint: a path or a URL.", show_default=False)]
StateLocation = Annotated[
    str, typer.Option(help="Where the state is, if the job has anabranch.stateLocation set.", show_default=False)
]
AnEpoch = Annotated[
    int | None, typer.Option(min=0, help="As of which epoch. [default: the one that Spark committed last]")
]
Force = Annotated[bool, typer.Option("--force", help="Go ahead even if the driver seems to be running.")]

checkpoint_app = typer.Typer(
    name="checkpoint", help="Look into the checkpoint of a job, and look after it.", no_args_is_help=True
)


@checkpoint_app.command("list")
def list_epochs(checkpoint: Checkpoint, state_location: StateLocation = "", as_json: AsJson = False) -> None:
    """List the epochs and snapshots of a checkpoint, with the rows that each has by stage."""
    place = find(checkpoint, state_location)
    found = replace(describe(place.storage), committed=place.committed)
    names = {stage.number: stage.name for stage in read_job(place.storage).stages}
    changes, rows = [f"#changes of {name}" for name in names.values()], [f"#rows of {name}" for name in names.values()]
    epochs = table("Epochs", "#epoch", "Spark", "#generation", "#run", "#route", "#files", "#size", *changes)
    for each in found.epochs:
        status = "committed" if each.epoch <= place.committed else "not yet"
        by = str(each.generation), str(each.run), str(each.route_version)
        epochs.add_row(str(each.epoch), status, *by, *_amounts(each.variables, names))
    snapshots = table("Snapshots", "#epoch", "written", "#generation", "#run", "#files", "#size", *rows)
    for of in found.snapshots:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(of.created_s))
        snapshots.add_row(str(of.epoch), written, str(of.generation), str(of.run), *_amounts(of.variables, names))
    sizes = "On disk: " + ", ".join(f"{name} {decimal(size)}" for name, size in found.sizes.items())
    document = {"checkpoint": place.storage.location, "stages": names} | found.to_json()
    tell(as_json, document, _headline(place, found.job_id), epochs, snapshots, sizes)
    for sentence in found.damaged:
        typer.echo(f"Damaged: {sentence}", err=True)


@checkpoint_app.command()
def show(
    checkpoint: Checkpoint, epoch: AnEpoch = None, state_location: StateLocation = "", as_json: AsJson = False
) -> None:
    """Show the job of a checkpoint, and the files that hold its state as of an epoch."""
    place = find(checkpoint, state_location)
    job = read_job(place.storage)
    files = state_files(place.storage, chosen_epoch(place, epoch))
    tables = []
    for stage in job.stages:
        columns = "state variable", "what it is", "#files", "#rows in the snapshot", "#changes since", "#size"
        tables.append(table(f"Stage {stage.number}, {stage.name}: key {schema_in_words(stage.key)}", *columns))
        for variable in stage.variables:
            of = [file for file in files.data_files if (file.stage, file.variable) == (stage.number, variable.name)]
            tables[-1].add_row(variable.name, _in_words(variable), *_sums(of))
    tables.append(table(f"Files of epoch {files.epoch}", "file", "holds", "#rows", "#size"))
    for file in files.data_files:
        holds = "changes" if isinstance(file, ChangeFile) else f"key groups {file.first_group} to {file.last_group}"
        tables[-1].add_row(file.path, holds, f"{file.rows:,}", decimal(file.bytes))
    about = f"{job.key_groups} key groups; state as of epoch {files.epoch}"
    tell(as_json, _shown(place, job, files), _headline(place, job.job_id), about, *tables)


@checkpoint_app.command("verify")
def verify_files(checkpoint: Checkpoint, state_location: StateLocation = "", as_json: AsJson = False) -> None:
    """Read every file of a checkpoint, and say what is damaged or missing; exit code 1 if anything is."""
    place = find(checkpoint, state_location)
    report = verified(place)
    problems = report.problems
    can_resume = not any(problem.path == paths.JOB or place.committed in problem.epochs for problem in problems)
    facts = {"checkpoint": place.storage.location, "committed": place.committed, "can_resume": can_resume}
    tell(as_json, facts | report.to_json(), *_report_in_words(place, report, can_resume))
    if problems:
        raise typer.Exit(1)


@checkpoint_app.command()
def export(
    checkpoint: Checkpoint,
    folder: Annotated[str, typer.Argument(help="A new or empty local folder.", show_default=False)],
    epoch: AnEpoch = None,
    state_location: StateLocation = "",
    as_json: AsJson = False,
) -> None:
    """Write the state as of an epoch as Parquet, one file for each state variable."""
    from anabranch.worker import compaction

    place = find(checkpoint, state_location)
    chosen = chosen_epoch(place, epoch)
    rows = while_it_runs(place, lambda: compaction.export(place.storage, chosen, folder), tries=1)
    lines = [f"The state as of epoch {chosen} is in {folder}:", *(f"  {name}: {n:,} rows" for name, n in rows.items())]
    tell(as_json, {"epoch": chosen, "folder": folder, "rows": rows}, *lines)


@checkpoint_app.command()
def compact(
    checkpoint: Checkpoint, state_location: StateLocation = "", force: Force = False, as_json: AsJson = False
) -> None:
    """Write a snapshot of the newest state. Only for jobs that are not running: those that run do it themselves."""
    from anabranch.worker import compaction

    place = find(checkpoint, state_location)
    check_not_running(place, force=force)
    epoch = chosen_epoch(place, None)
    snapshot = compaction.compact(place.storage, epoch, generation=latest_generation(place.storage))
    files, rows = len(snapshot.files), sum(file.rows for file in snapshot.files)
    size = sum(file.bytes for file in snapshot.files)
    line = f"The snapshot of epoch {epoch} has {rows:,} rows in {files} files, {decimal(size)}."
    tell(as_json, {"epoch": epoch, "files": files, "rows": rows, "bytes": size}, line)


@checkpoint_app.command()
def clean(
    checkpoint: Checkpoint,
    keep_epochs: Annotated[int, typer.Option(min=1, help="How many of the newest epochs stay.")] = Settings.keep_epochs,
    keep_seconds: Annotated[float, typer.Option(min=0, help="Epochs younger than this stay as well.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    state_location: StateLocation = "",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Delete what is not needed to restore the newest epochs. Only for jobs that are not running.

    Jobs that run do it themselves. An epoch is kept together with the snapshot that it starts from and all changes
    since, so make a snapshot first to free the most space.
    """
    place = find(checkpoint, state_location)
    read_job(place.storage)
    if not dry_run:
        check_not_running(place, force=force)
    cleaned = clean_up(
        _Untouched(place.storage.location) if dry_run else place.storage,
        committed=place.committed,
        keep_epochs=keep_epochs,
        keep_seconds=keep_seconds,
        now=time.time(),
        min_age_s=_ORPHAN_AGE_S,
    )
    gone = cleaned.deleted
    files = f"{len(list(gone))} files with {decimal(cleaned.bytes)}"
    tell(
        as_json,
        {"checkpoint": place.storage.location, "dry_run": dry_run} | asdict(cleaned),
        *(gone if dry_run else ()),
        f"{'Would delete' if dry_run else 'Deleted'} {files}: {len(gone.snapshots)} snapshots, {len(gone.manifests)} "
        f"manifests, {len(gone.data)} data files, {len(gone.temporary)} temporary files.",
        f"Epochs that can be restored: {epoch_ranges(cleaned.retained)}.",
    )


@checkpoint_app.command()
def rewind(
    checkpoint: Checkpoint,
    epoch: Annotated[int, typer.Argument(min=0, help="The epoch to return to.", show_default=False)],
    state_location: StateLocation = "",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Return to an older epoch, for example because newer state is damaged. Only for jobs that are not running.

    The query repeats the later epochs when it starts, from the very offsets that they had; its sources must still have
    those rows. File and memory sinks do not take an epoch twice.
    """
    place = find(checkpoint, state_location)
    check_not_running(place, force=force)
    if epoch > place.committed:
        raise CheckpointError(
            f"Epoch {epoch} is not an older one: Spark committed epoch {place.committed} last. Name that one, or one "
            "before it."
        )
    state_files(place.storage, Epoch(epoch))
    repeated = rewind_to(place.spark, place.storage, Epoch(epoch))
    line = f"The job is back at epoch {epoch}. When its query starts, it repeats these: {epoch_ranges(repeated)}."
    tell(as_json, {"epoch": epoch, "repeated": repeated}, line)


def savepoint(
    checkpoint: Checkpoint,
    target: Annotated[str, typer.Argument(help="Where it goes: a new path or URL.", show_default=False)],
    state_location: StateLocation = "",
    as_json: AsJson = False,
) -> None:
    """Save a job as of its last epoch, complete in itself, so that jobs can start from it. The job may be running."""
    from anabranch.control.epochs.savepoints import found, newest_epoch, take_savepoint

    place = find(checkpoint, state_location)
    if Storage(target).location in (place.storage.location, place.spark.location):
        raise CheckpointError(f"{target} is the checkpoint itself. Name another place for the savepoint.")

    def save() -> Savepoint:
        owned = found(checkpoint, state_location)
        return take_savepoint(owned, target, newest_epoch(owned))

    saved = while_it_runs(place, save, tries=_SAVEPOINT_TRIES)
    where = Storage(target).location
    line = f"Epoch {saved.epoch} of {saved.origin} is saved in {where}."
    tell(as_json, {"target": where} | asdict(saved), line)


class _Untouched(Storage):
    """A checkpoint from which nothing is deleted."""

    def delete(self, path: str) -> None:
        """Leaves the file where it is."""


# ------------------------------------------------------------------------------------------------------- words


def _headline(place: FoundCheckpoint, job_id: str) -> str:
    return f"Job {job_id} in {place.storage.location}: {_committed_in_words(place.committed)}."


def _committed_in_words(committed: Epoch) -> str:
    return "Spark has committed no epoch yet" if committed == NO_EPOCH else f"Spark committed epoch {committed} last"


def _in_words(variable: VariableSpec) -> str:
    if variable.kind is VariableKind.MAP:
        return f"map from {schema_in_words(variable.map_key)} to {schema_in_words(variable.value)}"
    return f"{variable.kind} of {schema_in_words(variable.value)}"


def _amounts(sizes: Sequence[VariableSize], stages: Iterable[int]) -> list[str]:
    """Files, bytes, and the rows of each stage."""
    rows = [sum(size.rows for size in sizes if size.stage == stage) for stage in stages]
    files, total = sum(size.files for size in sizes), sum(size.bytes for size in sizes)
    return [str(files), decimal(total), *(f"{count:,}" for count in rows)]


def _sums(files: Sequence[DataFile]) -> list[str]:
    changes = sum(file.rows for file in files if isinstance(file, ChangeFile))
    rows = sum(file.rows for file in files) - changes
    return [str(len(files)), f"{rows:,}", f"{changes:,}", decimal(sum(file.bytes for file in files))]


def _shown(place: FoundCheckpoint, job: JobDescription, files: StateFiles) -> dict[str, Any]:
    stages = []
    for stage in job.stages:
        variables = {variable.name: _in_words(variable) for variable in stage.variables}
        key = schema_in_words(stage.key)
        stages.append({"number": stage.number, "name": stage.name, "key": key, "variables": variables})
    return {
        "checkpoint": place.storage.location,
        "job_id": job.job_id,
        "key_groups": job.key_groups,
        "committed": place.committed,
        "epoch": files.epoch,
        "stages": stages,
        "snapshot_files": [asdict(file) for file in files.snapshot_files],
        "change_files": [asdict(file) for file in files.change_files],
    }


def _report_in_words(place: FoundCheckpoint, report: Report, can_resume: bool) -> Iterator[str | Table]:
    checked = f"{report.files} files with {decimal(report.bytes)}"
    yield f"Read {checked} of {place.storage.location}; epochs {epoch_ranges(report.epochs)}."
    if report.leftovers:
        yield f"A clean-up was interrupted; the next one deletes epochs {epoch_ranges(report.leftovers)}."
    if report.problems:
        damaged = table("Damaged", "file", "what is wrong", "epochs that need it")
        for problem in report.problems:
            damaged.add_row(problem.path, problem.reason, epoch_ranges(problem.epochs))
        yield damaged
    whole = "No epoch is whole" if report.newest_whole is None else f"The newest whole epoch is {report.newest_whole}"
    outcome = "the query can resume" if can_resume else "the query cannot resume unless the files are restored"
    yield f"{whole if report.epochs else 'There is no epoch'}; {_committed_in_words(place.committed)}: {outcome}."
