from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.checkpoint.documents import FORMAT_VERSION
from anabranch.checkpoint.evolution import schema_in_words
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.job import JobDescription, create_or_check, read_job
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, UnsupportedError
from anabranch.core.ids import JobId, StageNumber
from anabranch.core.schemas import StageSpec, VariableKind


@pytest.fixture
def job(stage: StageSpec) -> JobDescription:
    return JobDescription(FORMAT_VERSION, JobId("first"), 1024, (stage,))


def variable_replaced(stage: StageSpec, of: str, **fields: object) -> StageSpec:
    changed = tuple(replace(v, **fields) if v.name == of else v for v in stage.variables)  # type: ignore[arg-type]
    return replace(stage, variables=changed)


def refusal(storage: Storage, wanted: JobDescription) -> str:
    with pytest.raises(CheckpointError) as caught:
        create_or_check(storage, wanted)
    assert storage.location in str(caught.value)
    return str(caught.value)


def test_the_first_start_writes_the_job_and_later_ones_keep_its_id(storage: Storage, job: JobDescription) -> None:
    assert create_or_check(storage, job) == job
    assert read_job(storage) == job
    assert create_or_check(storage, replace(job, job_id=JobId("second"))) == job


def test_a_later_start_works_once_spark_has_offsets(storage: Storage, job: JobDescription) -> None:
    create_or_check(storage, job)
    claim_generation(storage, {})
    storage.write("offsets/0", b"v1")
    assert create_or_check(storage, job) == job


def test_of_two_first_starts_at_once_the_slower_one_takes_the_id_of_the_faster(
    storage: Storage, job: JobDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Storage.create

    def after_another(self: Storage, path: str, content: bytes) -> bool:
        monkeypatch.setattr(Storage, "create", create)
        create_or_check(storage, replace(job, job_id=JobId("faster")))
        return create(self, path, content)

    monkeypatch.setattr(Storage, "create", after_another)
    assert create_or_check(storage, job).job_id == "faster"


def test_nullability_time_zone_and_order_of_variables_may_change(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    create_or_check(storage, job)
    changed = replace(
        variable_replaced(stage, "visits", value=pa.schema([("at", pa.timestamp("us", tz="Europe/Berlin"))])),
        key=pa.schema([pa.field("user", pa.int64(), nullable=True)]),
    )
    changed = replace(changed, variables=changed.variables[::-1])
    assert create_or_check(storage, replace(job, stages=(changed,))).stages == (changed,)


def test_other_key_groups_are_refused_with_the_number_to_go_back_to(storage: Storage, job: JobDescription) -> None:
    create_or_check(storage, job)
    message = refusal(storage, replace(job, key_groups=512))
    assert "anabranch.keyGroups is 1024 in the checkpoint and 512 in this query" in message
    assert message.endswith("set it back to 1024 or use a new checkpoint.")


def test_another_key_is_refused_and_both_are_shown(storage: Storage, job: JobDescription, stage: StageSpec) -> None:
    create_or_check(storage, job)
    window = pa.struct([("start", pa.timestamp("us", tz="UTC")), ("end", pa.timestamp("us", tz="UTC"))])
    changed = replace(stage, key=pa.schema([("user", pa.string()), ("window", window)]))
    message = refusal(storage, replace(job, stages=(changed,)))
    assert (
        "the key of stage2 is (user bigint) in the checkpoint and "
        "(user string, window struct<start: timestamp, end: timestamp>) in this query"
    ) in message
    assert message.endswith("Change the key back or use a new checkpoint.")


Change = Callable[[StageSpec], StageSpec]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda s: variable_replaced(s, "value", value=pa.schema([("count", pa.int32())])),
            "value of stage2 is a value of (count bigint, total bigint) in the checkpoint and a value of (count int)",
        ),
        (
            lambda s: variable_replaced(s, "seen", kind=VariableKind.VALUE),
            "seen of stage2 is a list of (page string) in the checkpoint and a value of (page string)",
        ),
        (
            lambda s: variable_replaced(s, "visits", map_key=pa.schema([("page", pa.date32())])),
            "visits of stage2 is a map from (page string) to (at timestamp) in the checkpoint and "
            "a map from (page date) to (at timestamp)",
        ),
        (lambda s: replace(s, name="other"), "stage 2 is called stage2 in the checkpoint and other in this query"),
    ],
)
def test_changes_that_would_lose_or_misread_state_are_refused_and_both_sides_shown(
    storage: Storage, job: JobDescription, stage: StageSpec, change: Change, expected: str
) -> None:
    create_or_check(storage, job)
    assert expected in refusal(storage, replace(job, stages=(change(stage),)))


def test_missing_and_additional_stages_mean_another_job(
    storage: Storage, job: JobDescription, stage: StageSpec
) -> None:
    create_or_check(storage, job)
    other = replace(stage, number=StageNumber(3), name="stage3", variables=stage.variables[:1])
    message = refusal(storage, replace(job, stages=(other,)))
    assert "the checkpoint has the stateful stage stage2 with the key (user bigint)" in message
    assert "this query has the stateful stage stage3 with the key (user bigint)" in message
    assert message.count("It is a checkpoint of another job") == 2


def test_all_differences_are_named_at_once(storage: Storage, job: JobDescription, stage: StageSpec) -> None:
    create_or_check(storage, job)
    changed = variable_replaced(replace(stage, key=pa.schema([("x", pa.int64())])), "seen", kind=VariableKind.VALUE)
    message = refusal(storage, replace(job, key_groups=8, stages=(changed,)))
    assert message.count("\n  - ") == 3


def test_a_checkpoint_of_a_newer_format_asks_for_an_upgrade(storage: Storage, job: JobDescription) -> None:
    create_or_check(storage, replace(job, format_version=FORMAT_VERSION + 1))
    assert "Upgrade Anabranch" in refusal(storage, job)


@pytest.mark.parametrize("keep", [0, 1, 50, -10])
def test_a_truncated_description_is_an_error_that_names_the_file(
    storage: Storage, job: JobDescription, keep: int
) -> None:
    create_or_check(storage, job)
    path = Path(storage.location) / "anabranch" / "job.json"
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(storage, job)
    assert f"{path} is damaged" in message
    assert message.endswith("use a new checkpoint.")


def test_the_checkpoint_of_a_plain_spark_query_is_refused_and_left_alone(storage: Storage, job: JobDescription) -> None:
    storage.write("offsets/0", b"v1")
    message = refusal(storage, job)
    assert "is the checkpoint of a plain Spark query" in message
    assert message.endswith("Use a new checkpoint for this query.")
    assert not (Path(storage.location) / "anabranch").exists()


def test_a_used_checkpoint_without_its_description_is_damaged(storage: Storage, job: JobDescription) -> None:
    create_or_check(storage, job)
    claim_generation(storage, {})
    storage.delete("anabranch/job.json")
    message = refusal(storage, job)
    assert "job.json is missing" in message
    assert "Restore" in message


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path, job: JobDescription) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Cannot .*file/checkpoint/.*: Not a directory\. Make sure"):
        create_or_check(Storage(str(tmp_path / "file" / "checkpoint")), job)


def test_a_read_only_file_system_is_an_error(job: JobDescription) -> None:
    with pytest.raises(CheckpointError, match=r"Cannot create /proc/anabranch-checkpoint/anabranch/job\.json"):
        create_or_check(Storage("/proc/anabranch-checkpoint"), job)


def test_names_that_would_share_a_folder_are_refused(storage: Storage, job: JobDescription, stage: StageSpec) -> None:
    twins = replace(stage, variables=(stage.variables[0], replace(stage.variables[1], name="Value")))
    with pytest.raises(UnsupportedError, match=r"'value' and 'Value'.*Rename one"):
        create_or_check(storage, replace(job, stages=(twins,)))
    other = replace(stage, number=StageNumber(3))
    with pytest.raises(UnsupportedError, match="stages 'stage2' and 'stage2'"):
        create_or_check(storage, replace(job, stages=(stage, other)))
    assert not Path(storage.location).exists()


def test_types_are_told_in_the_words_of_spark() -> None:
    schema = pa.schema(
        [
            ("a", pa.bool_()),
            ("b", pa.decimal128(10, 2)),
            ("c", pa.list_(pa.float32())),
            ("d", pa.map_(pa.string(), pa.binary())),
            ("e", pa.struct([pa.field("x", pa.int16()), pa.field("y", pa.float64(), nullable=False)])),
            ("f", pa.timestamp("us")),
            ("g", pa.timestamp("us", tz="UTC")),
            ("h", pa.timestamp("ns")),
        ]
    )
    assert schema_in_words(schema) == (
        "(a boolean, b decimal(10,2), c array<float>, d map<string, binary>, e struct<x: smallint, y: double>, "
        "f timestamp_ntz, g timestamp, h timestamp[ns])"
    )
