"""Requests that nobody of ours would send, to real workers: a clear error, nothing changed, and the job goes on."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from anabranch.core import requests
from anabranch.core.errors import WorkerError
from anabranch.wire import messages
from anabranch.wire.client import WorkerClient
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import pack
from anabranch.wire.messages import TOKEN_HEADER, encode, kind_of
from anabranch.worker.stores.options import StoreOptions
from anabranch.worker.stores.redis import prefix_of
from support.keyed_state import KEYS, SPEC, STAGE, changes_to, entries, keys_table
from support.state_workers import CREDENTIALS, JOB, Driver, MakeDriver, changed

Send = Callable[..., Any]

PARENT = ["..", "../..", "", ".", "/", "job", "0" * 31, "0" * 33, "G" * 32, "0" * 31 + "/", "0" * 32 + "\n", "*" * 32]


@pytest.fixture
def one(make: MakeDriver) -> Driver:
    return make("a", store="rocksdb")


@pytest.fixture
def send(one: Driver) -> Iterator[Send]:
    """Sends bytes as an action, or as a ticket, with the token."""
    client = flight.FlightClient(f"grpc://{one.workers['a'].address}")

    def call(
        kind: str, body: bytes | pa.Buffer, token: bytes = CREDENTIALS.token.encode(), ticket: bool = False
    ) -> Any:
        options = flight.FlightCallOptions(timeout=20, headers=[(TOKEN_HEADER.encode(), token)])
        if ticket:
            return client.do_get(flight.Ticket(body), options).read_all()
        return list(client.do_action(flight.Action(kind, body), options))

    yield call
    client.close()


def assert_refused(one: Driver, attempt: Callable[[], Any], words: str = "") -> None:
    """The request fails with a sentence of the worker's, not with a failure inside it, and the job goes on."""
    before, held = one.scan_all(), one.workers["a"].ask(requests.Health())
    with pytest.raises(flight.FlightError) as caught:
        attempt()
    text = str(caught.value)
    assert "anabranch:{" in text, text
    assert "See its log" not in text, text
    assert words in text, text
    assert one.workers["a"].ask(requests.Health()) == held
    assert one.scan_all() == before
    one.run_epoch(changed(one, KEYS[:5]))


# ------------------------------------------------------------------------------------------------- the token


@pytest.mark.parametrize("token", [b"", b"wrong", b"secret ", b"\xff" * 3000])
def test_whoever_does_not_know_the_token_gets_nothing(one: Driver, send: Send, token: bytes) -> None:
    for kind, body in [("health", pack({})), ("close_job", pack(dict(one.job))), ("nonsense", b"")]:
        assert_refused(one, lambda kind=kind, body=body: send(kind, body, token), "asks for another token")
    assert_refused(one, lambda: send("", b"{}", token, ticket=True), "asks for another token")


def test_without_the_token_no_other_kind_of_call_is_answered_either(one: Driver) -> None:
    with flight.FlightClient(f"grpc://{one.workers['a'].address}") as stranger:
        path = flight.FlightDescriptor.for_path("x")
        for call in (
            lambda: list(stranger.list_flights()),
            lambda: list(stranger.list_actions()),
            lambda: stranger.get_flight_info(path),
            lambda: stranger.get_schema(path),
            lambda: stranger.do_put(path, pa.schema([]))[0].close(),
        ):
            with pytest.raises((flight.FlightError, OSError), match="asks for another token"):
                call()


def test_what_a_stranger_sends_is_not_even_read(send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr("anabranch.worker.server.service.unpack", lambda body, **_: read.append(body.size))
    with pytest.raises(flight.FlightUnauthenticatedError):
        send("write", b"\0" * (50 << 20), b"wrong")
    assert read == []


def test_a_token_of_any_characters_is_taken(one: Driver) -> None:
    client = WorkerClient(one.workers["a"].address, timeout_s=20, credentials=Credentials("geheim-ß \u2003x"))
    with pytest.raises(WorkerError, match="asks for another token"):
        client.call(requests.Health())
    client.close()


def test_headers_that_are_too_large_do_no_harm(one: Driver, send: Send) -> None:
    with pytest.raises(pa.ArrowException, match="exceeds hard limit"):
        send("health", pack({}), b"x" * (1 << 20))
    one.run_epoch(changed(one, KEYS[:5]))


# ---------------------------------------------------------------------------------------------------- job ids


@pytest.mark.parametrize("job", PARENT)
def test_a_job_id_of_another_form_is_refused_and_leads_to_no_folder(
    one: Driver, send: Send, tmp_path: Path, job: str
) -> None:
    kept = tmp_path / "precious"
    kept.write_text("x")
    opening = requests.OpenJob(
        job=JOB,
        generation=1,
        key_groups=16,
        committed_epoch=-1,
        committed_by=None,
        stages=(SPEC,),
        checkpoint=one.checkpoint,
    )
    other = {"job": job, "generation": 1}
    for kind, header in [("open_job", {**encode(opening), **other}), ("close_job", other), ("wipe", other)]:
        assert_refused(one, lambda kind=kind, header=header: send(kind, pack(header)), "32 hexadecimal digits")
    ticket = {"kind": "scan", "job": job, "generation": 1, "epoch": 0, "stage": 1, "variable": "total"}
    assert_refused(one, lambda: send("", json.dumps(ticket).encode(), ticket=True), "32 hexadecimal digits")
    assert kept.read_text() == "x"


@pytest.mark.parametrize("job", PARENT)
def test_no_job_id_of_another_form_becomes_a_path_or_a_prefix(tmp_path: Path, job: str) -> None:
    for attempt in (lambda: StoreOptions("rocksdb", tmp_path).open(job, SPEC, "total", 8), lambda: prefix_of(job)):
        with pytest.raises(WorkerError, match="32 hexadecimal digits"):
            attempt()


# --------------------------------------------------------------------------------------------------- frames


def frame(head: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<4sI", b"ANB1", len(head)) + head + rest


DEEP = b'{"_tables":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
MALFORMED = {
    "empty": b"",
    "short": b"ANB1\0",
    "other magic": b"GET / HTTP/1.1\r\n\r\n",
    "header cut off": struct.pack("<4sI", b"ANB1", 1 << 31) + b"{}",
    "no JSON": frame(b"\xff\xfe"),
    "a list": frame(b"[1]"),
    "a number": frame(b"7"),
    "nested too deep": frame(DEEP),
    "no tables": frame(b"{}"),
    "tables that are none": frame(b'{"_tables": 3}'),
    "tables of infinite length": frame(b'{"_tables": [["keys", Infinity]]}'),
    "tables of negative length": frame(b'{"_tables": [["keys", -1]]}'),
    "tables cut off": frame(b'{"_tables": [["keys", 4096]]}'),
    "tables that are not Arrow": frame(b'{"_tables": [["keys", 64]]}', b"\xff" * 256),
    "an Arrow file with holes": frame(b'{"_tables": [["keys", 64]]}', b"\xff\xff\xff\xff\x30\0\0\0" + b"\x01" * 256),
    "one table twice": frame(b'{"_tables": [["keys", 0], ["keys", 0]]}', b"\0" * 256),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_frame_is_refused(one: Driver, send: Send, body: bytes) -> None:
    assert_refused(one, lambda: send("health", body), "malformed")
    assert_refused(one, lambda: send("read", body), "malformed")


def test_a_header_that_is_too_large_is_not_read(one: Driver, send: Send) -> None:
    assert_refused(one, lambda: send("health", frame(b" " * ((64 << 20) + 1))), "larger than 64 MiB")


@pytest.mark.parametrize("ticket", [b"", b"\xff", b"3", b"[]", b"{}", b'{"kind": 3}', b'{"kind": []}', DEEP])
def test_a_malformed_ticket_is_refused(one: Driver, send: Send, ticket: bytes) -> None:
    assert_refused(one, lambda: send("", ticket, ticket=True))


def test_a_ticket_that_is_too_large_is_not_read(one: Driver, send: Send) -> None:
    assert_refused(one, lambda: send("", b" " * ((64 << 20) + 1), ticket=True), "larger than 64 MiB")


OFFSETS = {
    "beyond the end": [0, 1, 2_000_000_000, 3],
    "before the beginning": [0, -9_999_999, 2, 3],
    "back": [0, 3, 1, 3],
}


def texts(offsets: list[int], data: bytes = b"abc") -> pa.Array:
    """Texts that are where the offsets say."""
    buffers = [None, pa.py_buffer(np.array(offsets, dtype=np.int32).tobytes()), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
def test_values_that_lead_out_of_a_table_are_refused(one: Driver, send: Send, offsets: list[int]) -> None:
    one.begin()
    hashes, bad = keys_table(KEYS[:3]).column(0), texts(offsets)
    read = requests.Read(**one.numbers, stage=STAGE, groups=())
    write = requests.Write(**one.numbers, stage=STAGE, partition=0, attempt=0, chunk=0, last=True)
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2, 3], bad)], ["list"])
    changes = changes_to(dict.fromkeys(KEYS[:3], entries(1)))["total"].set_column(2, "k", bad)
    for request, tables in (
        (read, {messages.KEYS: pa.table([hashes, bad], names=["_hash", "k"])}),
        (read, {messages.KEYS: pa.table([hashes, nested], names=["_hash", "k"])}),
        (write, {"total": changes}),
    ):
        with pytest.raises(flight.FlightError, match=r"malformed: its table .* Offset invariant failure"):
            send(kind_of(type(request)), pack(encode(request), tables))
    assert one.workers["a"].ask(requests.ReportSeals(**one.numbers)).attempts == frozenset()
    one.finish()
    assert one.scan_all() == one.model


def test_texts_that_spark_has_though_they_are_not_utf_8_are_taken(one: Driver, send: Send) -> None:
    one.begin()
    keys = pa.table([keys_table(KEYS[:3]).column(0), texts([0, 1, 2, 3], b"\xff\xfe\xfd")], names=["_hash", "k"])
    read = requests.Read(**one.numbers, stage=STAGE, groups=())
    assert send("read", pack(encode(read), {messages.KEYS: keys}))
    one.finish()


# ------------------------------------------------------------------------------- frames that are well formed


@pytest.mark.parametrize(
    "kind", ["request", "job_request", "epoch_request", "scan", "fetch_groups", "__init__", "x" * 999, "ß" * 99_999]
)
def test_what_is_no_request_is_refused(one: Driver, send: Send, kind: str) -> None:
    header = {**one.job, "epoch": 1, "run": 1, "stage": 1, "variable": "total"}
    if kind in ("job_request", "request"):
        header = dict(one.job)
    if kind == "epoch_request":
        header = {**one.job, "epoch": 1, "run": 1}
    if kind == "scan":
        header.pop("run")
    if kind == "fetch_groups":
        header = {**one.job, "as_of": 1, "stage": 1, "variable": "total", "groups": [1]}
    assert_refused(one, lambda: send(kind, pack(header)))


def open_job(**other: Any) -> dict[str, Any]:
    """Opens another job than the one that is there."""
    request = requests.OpenJob(
        job="f" * 32,
        generation=1,
        key_groups=16,
        committed_epoch=-1,
        committed_by=None,
        stages=(SPEC,),
        checkpoint="memory",
    )
    return {**encode(request), **other}


WRONG_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a stage that is none": ("open_job", open_job(stages=[{"number": 1}])),
    "a stage of another type": ("open_job", open_job(stages=[{**SPEC.to_json(), "key": "zzz"}])),
    "no key groups": ("open_job", open_job(key_groups=0)),
    "too many key groups": ("open_job", open_job(key_groups=1 << 40)),
    "half a run": ("open_job", open_job(committed_by=[1])),
    "a number that is too large": ("open_job", open_job(committed_epoch=10**30)),
    "a text for a number": ("open_job", open_job(key_groups="16")),
    "an unknown field": ("open_job", open_job(password="x")),
    "an unknown field whose name is no text": ("open_job", open_job(**{"\ud800": 1})),
    "very many unknown fields": ("open_job", open_job(**{f"field {n}": n for n in range(9_999)})),
    "an attempt of two numbers": ("prepare", {"epoch": 2, "run": 2, "chosen": [[1, 2]]}),
    "a file that is none": (
        "assign",
        {"epoch": 1, "number": 9, "groups": [], "snapshot": [{"x": 1}], "changes": []},
    ),
    "a peer that is none": (
        "assign",
        {"epoch": 1, "number": 9, "groups": [1], "snapshot": [], "changes": [], "peers": [{"groups": [1]}]},
    ),
    "a key group that does not exist": (
        "assign",
        {"epoch": 1, "number": 9, "groups": [99], "snapshot": [], "changes": []},
    ),
}


@pytest.mark.parametrize(("kind", "header"), WRONG_HEADERS.values(), ids=WRONG_HEADERS)
def test_a_header_with_wrong_values_is_refused(one: Driver, send: Send, kind: str, header: dict[str, Any]) -> None:
    assert_refused(one, lambda: send(kind, pack({**one.job, **header})))


WRONG_TABLES = {
    "no key": {messages.KEYS: pa.table({"x": [1]})},
    "a key of another type": {messages.KEYS: pa.table({"_hash": [1], "k": [2.5]})},
    "a hash of another type": {messages.KEYS: keys_table(KEYS[:2]).set_column(0, "_hash", pa.array(["a", "b"]))},
    "a hash that is null": {
        messages.KEYS: keys_table(KEYS[:2]).set_column(0, "_hash", pa.array([1, None], pa.int64()))
    },
    "no keys": {},
    "load of no key group": {messages.KEYS: keys_table(KEYS[:2]), messages.FURTHER_ROWS: pa.table({"x": ["a"]})},
    "load of a key group that does not exist": {
        messages.KEYS: keys_table(KEYS[:2]),
        messages.FURTHER_ROWS: pa.table({"_group": [1 << 40], "rows": [3]}),
    },
}


@pytest.mark.parametrize("tables", WRONG_TABLES.values(), ids=WRONG_TABLES)
def test_a_read_with_wrong_tables_is_refused(one: Driver, send: Send, tables: dict[str, pa.Table]) -> None:
    one.begin()
    read = requests.Read(**one.numbers, stage=STAGE, groups=())
    with pytest.raises(flight.FlightError) as caught:
        send("read", pack(encode(read), tables))
    assert "See its log" not in str(caught.value)
    one.write(changed(one, KEYS[:5]))
    one.commit()
    assert one.scan_all() == one.model


@pytest.mark.parametrize("expiry", [{}, {"variable": 3, "column": "n", "field": "", "up_to": 1}, {"x": 1}])
def test_a_read_of_what_is_due_with_wrong_values_is_refused(one: Driver, send: Send, expiry: dict[str, Any]) -> None:
    one.begin()
    for wanted in ({"due": expiry}, {"expired": [expiry]}):
        read = {**one.numbers, "stage": STAGE, "groups": [], **wanted}
        with pytest.raises(flight.FlightError) as caught:
            send("read", pack(read, {messages.KEYS: keys_table(KEYS[:2])}))
        assert "See its log" not in str(caught.value)
    one.finish()


def test_a_write_with_wrong_columns_stages_nothing(one: Driver, send: Send) -> None:
    one.begin()
    write = requests.Write(**one.numbers, stage=STAGE, partition=0, attempt=0, chunk=0, last=True)
    for tables in ({"total": keys_table(KEYS[:2])}, {"nobody": keys_table(KEYS[:2])}):
        with pytest.raises(flight.FlightError) as caught:
            send("write", pack(encode(write), tables))
        assert "See its log" not in str(caught.value)
    assert one.workers["a"].ask(requests.ReportSeals(**one.numbers)).attempts == frozenset()
    one.finish()
    assert one.scan_all() == one.model
    assert JOB in one.workers["a"].ask(requests.Health()).jobs
