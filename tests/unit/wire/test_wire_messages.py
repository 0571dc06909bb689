"""Requests and answers: there and back, and every field checked when it arrives."""

import json
from typing import Any, cast

import pyarrow as pa
import pytest
from msgspec import structs

from anabranch.core import answers, requests
from anabranch.core.errors import WorkerError
from anabranch.core.ids import (
    Attempt,
    Epoch,
    Generation,
    JobId,
    Partition,
    Run,
    RunId,
    StageAttempt,
    StageNumber,
    WorkerId,
)
from anabranch.core.requests import REQUESTS, Request
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.core.state_files import ChangeFile, SnapshotFile
from anabranch.wire.messages import decode, decode_answer, decode_ticket, encode, encode_ticket, kind_of

JOB: dict[str, Any] = {"job": JobId("0" * 32), "generation": Generation(3)}
EPOCH = {**JOB, "epoch": Epoch(2), "run": Run(1)}
PLACE = {"stage": StageNumber(1), "variable": "v"}
SPEC = StageSpec(
    StageNumber(1),
    "stage1",
    pa.schema([("k", pa.string())]),
    (VariableSpec("v", VariableKind.MAP, pa.schema([("n", pa.decimal128(12, 3))]), pa.schema([("m", pa.int64())])),),
    {"operator": "aggregate"},
    ("old",),
)
assert SPEC.layouts, "what a spec has computed does not travel"
CHANGES = ChangeFile(StageNumber(1), "v", WorkerId("w"), "a/b.parquet", 3, 100, "x")
SNAPSHOT = SnapshotFile(StageNumber(1), "v", 0, 7, "a/c.parquet", 3, 100, "x")
OFFER = answers.SharedOffer(incarnation="1.2", groups=(3, 4), versions=(8, 9))
ATTEMPT = StageAttempt(StageNumber(1), Partition(2), Attempt(3))
ROUTE = answers.RouteTable(workers=(WorkerId("w"),), addresses=("w:1",), owners=(0, 0))
PROGRESS = answers.TransferProgress(assignment=4, pending_groups=3, frozen_groups=2, drained_rows=9)
EXPIRY = requests.Expiry("v", "n", "", 7)

EXAMPLES: list[Request[Any]] = [
    requests.Health(),
    requests.OpenJob(
        **JOB,
        key_groups=8,
        committed_epoch=Epoch(1),
        committed_by=RunId(Generation(2), Run(1)),
        stages=(SPEC,),
        checkpoint="memory",
    ),
    requests.CloseJob(**JOB, goes_on=True),
    requests.Wipe(**JOB),
    requests.Assign(
        **JOB,
        epoch=Epoch(1),
        number=4,
        groups=(1, 2),
        snapshot=(SNAPSHOT,),
        changes=(CHANGES, CHANGES),
        peers=(requests.PeerOffer(address="w:1", groups=(1,)),),
        shared=(OFFER,),
    ),
    requests.HandOver(**JOB, epoch=Epoch(1), number=4, keep=(1, 2)),
    requests.ReportProgress(**JOB),
    requests.Complete(**JOB),
    requests.Release(**JOB, number=4),
    requests.Begin(**EPOCH, routing=ROUTE, drain_rows=100),
    requests.LookUpRoute(**JOB),
    requests.Read(
        **EPOCH, stage=StageNumber(1), groups=(1, 2), hashes=(-(2**63), 2**63 - 1), expired=(EXPIRY,), due=EXPIRY
    ),
    requests.Write(**EPOCH, **ATTEMPT._asdict(), chunk=0, last=True, late=3),
    requests.ReportSeals(**EPOCH),
    requests.Prepare(**EPOCH, chosen=frozenset({ATTEMPT}), deferred=((Epoch(1), Run(0)),)),
    requests.Commit(**EPOCH),
    requests.Abort(**EPOCH),
    requests.Flush(**JOB, deferred=((Epoch(1), Run(0)),)),
    requests.Describe(**JOB),
    requests.Scan(**JOB, **PLACE, epoch=Epoch(1)),
    requests.FetchKeys(**JOB, **PLACE, as_of=Epoch(1)),
    requests.FetchGroups(**JOB, **PLACE, as_of=Epoch(1), groups=(1,), recent=True),
    requests.FetchDue(**JOB, **PLACE, as_of=Epoch(1), groups=(1,), column="n", field="", since=-5, up_to=7),
]
#: By the type of a request that gets it.
ANSWERS: dict[type[Request[Any]], Any] = {
    requests.Health: answers.WorkerHealth(worker=WorkerId("w"), pid=7, store="memory", jobs=frozenset({JOB["job"]})),
    requests.OpenJob: answers.Opened(groups=(1, 2)),
    requests.Assign: answers.Assigned(adopted=1, dropped=2, progress=PROGRESS),
    requests.HandOver: answers.HandedOver(offers=(OFFER,)),
    requests.Commit: PROGRESS,
    requests.LookUpRoute: ROUTE,
    requests.ReportSeals: answers.SealedAttempts(attempts=frozenset({ATTEMPT})),
    requests.Prepare: answers.Prepared(
        files=((Epoch(1), CHANGES), (Epoch(2), CHANGES)),
        rows=3,
        variables=(answers.VariableChanges(**PLACE, put=2, removed=1),),
        late=(answers.DroppedRows(stage=StageNumber(1), rows=2),),
    ),
    requests.Flush: answers.Flushed(files=((Epoch(1), CHANGES),)),
    requests.Describe: answers.HeldState(
        progress=PROGRESS, load=((3, 1.5),), variables=(answers.HeldVariable(**PLACE, rows=2, bytes=30),)
    ),
    requests.Begin: answers.Done(),
}


def name_of(request: Request[Any]) -> str:
    return kind_of(type(request))


def document_of(message: Any) -> dict[str, Any]:
    """What arrives of a message."""
    return cast(dict[str, Any], json.loads(json.dumps(encode(message))))


def test_there_is_an_example_of_every_request() -> None:
    assert [type(request) for request in EXAMPLES] == list(REQUESTS)


@pytest.mark.parametrize("request_", EXAMPLES, ids=name_of)
def test_every_request_comes_back_as_it_was(request_: Request[Any]) -> None:
    assert decode(name_of(request_), document_of(request_)) == request_
    assert decode_ticket(json.loads(encode_ticket(request_))) == request_


@pytest.mark.parametrize("request_", EXAMPLES, ids=name_of)
def test_every_field_is_checked(request_: Request[Any]) -> None:
    kind, document = name_of(request_), document_of(request_)
    for name, value in document.items():
        wrong: Any = "three" if isinstance(value, int) else 3
        with pytest.raises(WorkerError, match=rf"request '{kind}' cannot be read: .*\$\.{name}`. Run the same version"):
            decode(kind, {**document, name: wrong})
    with pytest.raises(WorkerError, match="unknown field `extra`"):
        decode(kind, {**document, "extra": 1})


@pytest.mark.parametrize("asked", ANSWERS, ids=lambda kind: kind.__name__)
def test_every_answer_comes_back_as_it_was(asked: type[Request[Any]]) -> None:
    request = next(each for each in EXAMPLES if type(each) is asked)
    assert decode_answer(request, document_of(ANSWERS[asked])) == ANSWERS[asked]


def test_an_answer_of_another_version_is_an_error() -> None:
    for document in ({}, {"attempts": [[1, 2]]}, {"attempts": None}):
        with pytest.raises(WorkerError, match=r"The answer to 'report_seals' cannot be read: .*Run the same version"):
            decode_answer(requests.ReportSeals(**EPOCH), document)


def test_a_stage_comes_back_with_its_types() -> None:
    opening = decode("open_job", document_of(EXAMPLES[1]))
    assert isinstance(opening, requests.OpenJob)
    (spec,) = opening.stages
    assert spec == SPEC
    assert (dict(spec.traits), spec.layouts["v"].rows) == (dict(SPEC.traits), SPEC.layouts["v"].rows)


def test_a_truth_value_is_no_number_and_null_is_nothing() -> None:
    document = document_of(requests.Write(**EPOCH, **ATTEMPT._asdict(), chunk=0, last=True))
    for wrong in (True, None, 1.0):
        with pytest.raises(WorkerError, match=r"\$\.epoch"):
            decode("write", {**document, "epoch": wrong})
    with pytest.raises(WorkerError, match=r"\$\.last"):
        decode("write", {**document, "last": 1})


def test_lists_are_checked_to_their_items() -> None:
    assign = document_of(requests.Assign(**JOB, epoch=Epoch(1), number=9, groups=(), snapshot=(), changes=()))
    prepare = document_of(requests.Prepare(**EPOCH, chosen=frozenset()))
    assert decode("assign", {**assign, "groups": [1, 2], "changes": [document_of(CHANGES)]})
    for name, wrong in [("groups", [1, "2"]), ("groups", {"0": 1}), ("changes", [1]), ("changes", [{"a": None}])]:
        with pytest.raises(WorkerError, match=rf"\$\.{name}"):
            decode("assign", {**assign, name: wrong})
    assert decode("prepare", {**prepare, "chosen": [[1, 2, 3]]})
    with pytest.raises(WorkerError, match=r"\$\.chosen"):
        decode("prepare", {**prepare, "chosen": [[1, 2, None]]})


def test_key_groups_of_a_shared_store_are_offered_with_a_version_of_each() -> None:
    with pytest.raises(ValueError, match="without a version of each"):
        structs.replace(OFFER, versions=(1,))


def test_a_field_that_is_missing_is_named_unless_it_has_a_default() -> None:
    request = requests.Write(**EPOCH, **ATTEMPT._asdict(), chunk=0, last=True, late=0)
    document = document_of(request)
    assert decode("write", {name: value for name, value in document.items() if name != "late"}) == request
    del document["chunk"]
    with pytest.raises(WorkerError, match=r"'write' cannot be read: .*missing required field `chunk`. Run the same"):
        decode("write", document)


@pytest.mark.parametrize("kind", ["", "nothing", "Health", "__init__"])
def test_an_unknown_request_is_refused(kind: str) -> None:
    with pytest.raises(WorkerError, match="Unknown request"):
        decode(kind, {})
