"""A job whose state changes from one start to the next: what is allowed, what is saved, and what binds whom."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.checkpoint import documents
from anabranch.checkpoint.documents import FORMAT_VERSION
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.job import JobDescription, create_or_check, deleted_variables, read_job, save_shape
from anabranch.checkpoint.manifests import Manifest, write_manifest
from anabranch.checkpoint.shapes import former_places
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, FencedError
from anabranch.core.ids import Epoch, Generation, JobId, RouteVersion, Run, StageNumber
from anabranch.core.schemas import JOIN_TYPE, MEANING, OPERATOR, StageSpec, VariableKind, VariableSpec
from support.sentences import says

COUNT, TOTAL = pa.field("count", pa.int64(), nullable=False), pa.field("total", pa.int64())
ADDED = VariableSpec("added", VariableKind.VALUE, pa.schema([("x", pa.int8())]))

Change = Callable[[StageSpec], StageSpec]


@pytest.fixture
def job(stage: StageSpec) -> JobDescription:
    return JobDescription(FORMAT_VERSION, JobId("first"), 1024, (stage,))


def with_value(stage: StageSpec, *fields: pa.Field | tuple[str, pa.DataType]) -> StageSpec:
    """The stage with these fields in its variable ``value``."""
    value, *others = stage.variables
    return replace(stage, variables=(replace(value, value=pa.schema(list(fields))), *others))


def changed(job: JobDescription, change: Change) -> JobDescription:
    return replace(job, stages=tuple(change(stage) for stage in job.stages))


def start(storage: Storage, job: JobDescription) -> tuple[JobDescription, Generation, bool]:
    """What a driver does before its first epoch; whether it saved a shape."""
    accepted = create_or_check(storage, job)
    generation = claim_generation(storage, {})
    return accepted, generation, save_shape(storage, accepted, generation)


def commit(storage: Storage, epoch: int, generation: Generation, *, in_spark: bool = True) -> None:
    write_manifest(storage, Manifest(Epoch(epoch), generation, Run(0), RouteVersion(1), ()))
    if in_spark:
        storage.write(f"commits/{epoch}", b"v1")


def refusal(storage: Storage, wanted: JobDescription) -> str:
    with pytest.raises(CheckpointError) as caught:
        create_or_check(storage, wanted)
    return str(caught.value)


ALLOWED: dict[str, Change] = {
    "a new field": lambda s: with_value(s, COUNT, TOTAL, ("last", pa.string())),
    "another order": lambda s: with_value(s, TOTAL, COUNT),
    "a new field in front": lambda s: with_value(s, ("first", pa.string()), COUNT, TOTAL),
    "a new variable": lambda s: replace(s, variables=(ADDED, *s.variables)),
    "a variable less": lambda s: replace(s, variables=s.variables[1:]),
    "a variable of another name": lambda s: replace(
        s, variables=(replace(s.variables[0], name="other"), *s.variables[1:])
    ),
    "other nullability": lambda s: with_value(s, ("count", pa.int64()), TOTAL),
}


@pytest.mark.parametrize("change", ALLOWED.values(), ids=ALLOWED)
def test_an_allowed_change_is_saved_once_and_job_json_stays(
    storage: Storage, job: JobDescription, change: Change
) -> None:
    assert start(storage, job) == (job, 1, False)
    commit(storage, 0, Generation(1))
    written = storage.read("anabranch/job.json")
    wanted = changed(job, change)
    assert start(storage, replace(wanted, job_id=JobId("second"))) == (wanted, 2, True)
    assert storage.list_names("anabranch/shapes") == ["00000002.json"]
    assert read_job(storage) == wanted
    commit(storage, 1, Generation(2))
    assert start(storage, wanted) == (wanted, 3, False)
    assert storage.list_names("anabranch/shapes") == ["00000002.json"]
    assert storage.read("anabranch/job.json") == written


REFUSED: dict[str, tuple[Change, str]] = {
    "narrower": (
        lambda s: with_value(s, ("count", pa.int32()), TOTAL),
        "value of stage2 … (count bigint, total bigint) in the checkpoint … (count int, total bigint) in this query: "
        "field count cannot change from bigint to int. Change it back … a new name … or use a new checkpoint",
    ),
    "gone": (lambda s: with_value(s, COUNT), "field total is not in this query. Change it back"),
    "never null": (
        lambda s: with_value(s, COUNT, TOTAL, pa.field("last", pa.int8(), nullable=False)),
        "(count bigint, total bigint, last tinyint) in this query: field last is new and may not be null.",
    ),
    "another kind": (
        lambda s: replace(s, variables=(replace(s.variables[0], kind=VariableKind.LIST), *s.variables[1:])),
        "a value cannot become a list",
    ),
    "another map key": (
        lambda s: replace(
            s, variables=(*s.variables[:2], replace(s.variables[2], map_key=pa.schema([("page", pa.large_string())])))
        ),
        "the key of a map cannot change",
    ),
    "a wider key": (
        lambda s: replace(s, key=pa.schema([("user", pa.float64())])),
        "the key of stage2 is (user bigint) in the checkpoint and (user double) in this query. A key cannot change",
    ),
}


@pytest.mark.parametrize(("change", "expected"), REFUSED.values(), ids=REFUSED)
def test_other_changes_are_refused_and_nothing_is_written(
    storage: Storage, job: JobDescription, change: Change, expected: str
) -> None:
    _, generation, _ = start(storage, job)
    message = refusal(storage, changed(job, change))
    assert says(message, f"… {expected}"), message
    with pytest.raises(CheckpointError, match="does not fit this query"):
        save_shape(storage, changed(job, change), generation)
    assert storage.list_names("anabranch/shapes") == []


def test_stages_are_the_same_whatever_their_numbers(stage: StageSpec) -> None:
    first, second = stage, replace(stage.numbered(StageNumber(4), "counts"), traits={OPERATOR: "aggregate"})
    moved = first.numbered(StageNumber(3), "stage3"), second.numbered(StageNumber(9), "counts")
    assert former_places((first, second), moved) == ((2, "stage2"), (4, "counts"))
    assert former_places((first,), (first,)) == ((2, "stage2"),)


def test_stages_of_other_keys_operators_or_names_are_others(stage: StageSpec) -> None:
    named = stage.numbered(StageNumber(3), "counts")
    counting, joining = (replace(stage, traits={OPERATOR: operator}) for operator in ("aggregate", "join"))
    for before, now in [
        ((), (stage,)),
        ((stage, named), (named,)),
        ((stage,), (named,)),
        ((named,), (stage,)),
        ((counting,), (joining,)),
        ((stage,), (replace(stage, key=pa.schema([("page", pa.string())])),)),
    ]:
        assert former_places(before, now) is None


def test_dropped_fields_are_remembered_until_they_come_back(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    start(storage, job)
    commit(storage, 0, Generation(1))
    fewer = replace(job, stages=(with_value(replace(stage, may_drop_fields=True), COUNT),))
    accepted, generation, saved = start(storage, fewer)
    assert saved
    assert accepted.stages[0].variables[0].dropped == pa.schema([TOTAL])
    assert accepted.stages[0].layouts["value"].dropped == {"total"}
    commit(storage, 1, generation)
    # Whoever comes next need not wish for it again, but what was dropped keeps its type.
    as_before = replace(job, stages=(with_value(stage, COUNT),))
    assert start(storage, as_before)[0].stages[0].variables[0].dropped == pa.schema([TOTAL])
    other = replace(job, stages=(with_value(stage, COUNT, ("total", pa.string())),))
    assert "field total cannot change from bigint to string" in refusal(storage, other)
    back, _, _ = start(storage, job)
    assert back.stages[0].variables[0].dropped == pa.schema([])


def test_a_field_that_says_what_it_means_is_not_dropped(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    total = TOTAL.with_metadata({MEANING: b"a sum"})
    start(storage, replace(job, stages=(with_value(stage, COUNT, total),)))
    fewer = replace(job, stages=(with_value(replace(stage, may_drop_fields=True), COUNT),))
    assert "field total is not in this query" in refusal(storage, fewer)


def test_each_step_is_measured_against_the_one_before(storage: Storage, job: JobDescription, stage: StageSpec) -> None:
    steps = [
        with_value(stage, COUNT, TOTAL, ("n", pa.int8())),
        with_value(stage, ("n", pa.int32()), COUNT, TOTAL),
        with_value(stage, ("n", pa.float64()), COUNT, TOTAL, ("m", pa.string())),
    ]
    start(storage, job)
    for epoch, step in enumerate(steps):
        wanted = replace(job, stages=(step,))
        _, generation, saved = start(storage, wanted)
        assert saved
        commit(storage, epoch, generation)
        assert read_job(storage) == wanted
    assert "field n is not in this query, field m is not in this query" in refusal(storage, job)
    back = replace(job, stages=(steps[1],))
    assert "field n cannot change from double to int, field m is not in this query" in refusal(storage, back)


def test_a_version_that_failed_before_its_first_epoch_can_be_taken_back(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    wider = replace(job, stages=(with_value(stage, COUNT, TOTAL, ("n", pa.int8())),))
    _, first, _ = start(storage, job)
    commit(storage, 0, first)
    _, second, _ = start(storage, wider)
    commit(storage, 1, second, in_spark=False)
    # Also to something else altogether.
    other = replace(job, stages=(with_value(stage, COUNT, TOTAL, ("n", pa.string())),))
    assert create_or_check(storage, other) == other
    _, third, saved = start(storage, job)
    assert saved, "the newest shape is not that of this query"
    commit(storage, 1, third)
    assert read_job(storage) == job
    assert start(storage, other)[2]


def test_a_version_that_committed_an_epoch_binds_the_next(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    wider = replace(job, stages=(with_value(stage, COUNT, TOTAL, ("n", pa.int8())),))
    _, first, _ = start(storage, job)
    commit(storage, 0, first)
    start(storage, wider)
    _, third, saved = start(storage, wider)
    assert not saved
    commit(storage, 1, third)
    assert "field n is not in this query" in refusal(storage, job)


def test_without_epochs_the_newest_shape_binds(storage: Storage, job: JobDescription, stage: StageSpec) -> None:
    start(storage, job)
    start(storage, replace(job, stages=(with_value(stage, COUNT, TOTAL, ("n", pa.int8())),)))
    assert "field n is not in this query" in refusal(storage, job)


def test_a_removed_variable_is_remembered_until_it_comes_back(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    without = replace(job, stages=(replace(stage, variables=stage.variables[1:]),))
    also = replace(job, stages=(replace(stage, variables=(ADDED, *stage.variables[1:])),))
    wider = replace(job, stages=(with_value(stage, COUNT, TOTAL, ("n", pa.int8())),))
    for epoch, version in enumerate([job, without, also]):
        _, generation, _ = start(storage, version)
        commit(storage, epoch, generation)
    changed_meanwhile = replace(job, stages=(with_value(stage, ("count", pa.string()), TOTAL),))
    message = refusal(storage, changed_meanwhile)
    assert "is a value of (count bigint, total bigint) in the checkpoint and a value of (count string, tot" in message
    _, generation, _ = start(storage, wider)
    commit(storage, 3, generation)
    # Back in the query, it is no longer what it was when it was removed.
    assert "field n is not in this query" in refusal(storage, job)


def test_a_deletion_counts_from_the_first_version_that_commits_an_epoch_with_it(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    deleting = replace(job, stages=(replace(stage, variables=stage.variables[1:], deleted=("value", "unheard-of")),))

    def run(version: JobDescription, epoch: int | None) -> dict[tuple[int, str], Generation]:
        _, generation, _ = start(storage, version)
        if epoch is not None:
            commit(storage, epoch, generation)
        return dict(deleted_variables(storage))

    assert run(job, 0) == {}
    assert run(deleting, None) == {(2, "value"): 2}
    assert run(job, 1) == {}, "no epoch was committed under the version that deletes"
    assert run(deleting, 2) == {(2, "value"): 4}
    assert run(deleting, 3) == {(2, "value"): 4}, "deleted it was before"
    assert run(job, 4) == {(2, "value"): 4}
    assert run(job, 5) == {(2, "value"): 4}
    assert run(deleting, 6) == {(2, "value"): 8}, "there was something to delete again"


def test_stages_and_shapes_of_before_there_were_traits_and_deletions_are_read(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    known = replace(job, stages=(replace(stage, traits={OPERATOR: "join", JOIN_TYPE: "Inner"}),))
    start(storage, job)
    start(storage, changed(job, ALLOWED["a new variable"]))
    for path in ("anabranch/job.json", "anabranch/shapes/00000002.json"):
        content = documents.decode(storage, path, storage.read(path))
        content.pop("deleted", None)
        for described in content["stages"]:
            del described["traits"], described["deleted"]
        storage.write(path, documents.encode({name: content[name] for name in content if name != "format_version"}))
    assert deleted_variables(storage) == {}
    wanted = changed(known, ALLOWED["a new variable"])
    assert start(storage, wanted)[2], "now it is known what the operator is"
    other = replace(wanted, stages=(replace(wanted.stages[0], traits={OPERATOR: "join", JOIN_TYPE: "LeftOuter"}),))
    assert "the join type of stage2 is Inner in the checkpoint and LeftOuter in this query" in refusal(storage, other)


def test_a_new_field_that_would_rename_the_column_of_another_is_refused(storage: Storage, job: JobDescription) -> None:
    def with_fields(*names: str) -> JobDescription:
        return changed(job, lambda stage: with_value(stage, *((name, pa.int64()) for name in names)))

    # The key is called user, so the column of the value field user is called value.user.
    start(storage, with_fields("user", "n"))
    message = refusal(storage, with_fields("user", "n", "value.user"))
    assert "field user is the column value.user of files, which would now be called value.value.user" in message
    create_or_check(storage, with_fields("n", "m", "user"))


def test_an_aggregate_of_the_same_name_and_type_but_another_function_is_refused(
    storage: Storage, job: JobDescription
) -> None:
    def with_function(function: bytes) -> JobDescription:
        return changed(job, lambda stage: with_value(stage, COUNT, TOTAL.with_metadata({MEANING: function})))

    start(storage, job)
    assert start(storage, with_function(b"sum"))[2], "now it is known what total means"
    message = refusal(storage, with_function(b"max"))
    assert "field total is sum in the checkpoint and max in this query" in message


def test_a_driver_that_was_replaced_saves_nothing(storage: Storage, job: JobDescription) -> None:
    _, generation, _ = start(storage, job)
    claim_generation(storage, {})
    with pytest.raises(FencedError):
        save_shape(storage, changed(job, ALLOWED["a new variable"]), generation)
    assert storage.list_names("anabranch/shapes") == []


def test_what_an_older_driver_committed_until_it_was_fenced_counts(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    _, first, _ = start(storage, job)
    commit(storage, 0, first)
    _, second, _ = start(storage, replace(job, stages=(with_value(stage, COUNT, TOTAL, ("n", pa.int8())),)))
    accepted = create_or_check(storage, job)
    commit(storage, 1, second)
    third = claim_generation(storage, {})
    with pytest.raises(CheckpointError, match="field n is not in this query"):
        save_shape(storage, accepted, third)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: raw.replace(b'"variables"', b'"wariables"')])
def test_a_damaged_shape_is_an_error_that_names_the_file(
    storage: Storage, job: JobDescription, damage: Callable[[bytes], bytes]
) -> None:
    start(storage, job)
    start(storage, changed(job, ALLOWED["a new variable"]))
    path = Path(storage.full_path("anabranch/shapes/00000002.json"))
    path.write_bytes(damage(path.read_bytes()))
    for read in (lambda: read_job(storage), lambda: create_or_check(storage, job)):
        with pytest.raises(CheckpointError, match=rf"{path} is damaged.*use a new checkpoint"):
            read()


def test_a_shape_in_the_place_of_another_is_an_error(storage: Storage, job: JobDescription) -> None:
    start(storage, job)
    start(storage, changed(job, ALLOWED["a new variable"]))
    storage.write("anabranch/shapes/00000003.json", storage.read("anabranch/shapes/00000002.json"))
    with pytest.raises(CheckpointError, match=r"00000003\.json is damaged: .*it is of generation 2"):
        read_job(storage)
