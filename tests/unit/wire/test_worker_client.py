"""The client of one worker: answers and errors come back typed, and nothing waits for ever."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from anabranch.core.answers import WorkerHealth
from anabranch.core.errors import AnabranchError, CheckpointError, EpochError, FencedError, LostWorkerError, WorkerError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.requests import FetchKeys, Health, Scan
from anabranch.wire.client import Connections, WorkerClient, encode_error
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import pack, unpack
from anabranch.wire.messages import encode

ABOUT: dict[str, Any] = {"job": "0" * 32, "generation": 1, "stage": 3, "variable": "v"}
SCAN = Scan(**ABOUT, epoch=Epoch(2))
FETCH = FetchKeys(**ABOUT, as_of=Epoch(2))
HEALTH = WorkerHealth(worker=WorkerId("w"), pid=7, store="memory", jobs=frozenset())


class Worker(flight.FlightServerBase):
    """A worker that does as it is told."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(f"grpc://127.0.0.1:{port}")
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None
        #: Set: answers come at once.
        self.awake = threading.Event()
        self.awake.set()

    def do_action(self, _context: Any, action: flight.Action) -> Iterator[flight.Result]:
        header, tables = unpack(action.body)
        self.seen.append((action.type, header))
        self.awake.wait(30)
        if self.error is not None:
            raise self.error
        return iter([flight.Result(pack(encode(HEALTH), tables))])

    def do_get(self, _context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        self.seen.append(("ticket", {"text": ticket.ticket}))
        schema = pa.schema([("n", pa.int64())])

        def batches() -> Iterator[pa.RecordBatch]:
            yield pa.record_batch([pa.array([1, 2])], schema=schema)
            if self.error is not None:
                raise self.error

        return flight.GeneratorStream(schema, batches())


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker() as server:
        yield server
        server.awake.set()


@pytest.fixture
def client(worker: Worker) -> Iterator[WorkerClient]:
    client = WorkerClient(f"127.0.0.1:{worker.port}", timeout_s=20, credentials=Credentials("secret"))
    yield client
    client.close()


def test_a_request_takes_the_token_and_tables_with_it(worker: Worker, client: WorkerClient) -> None:
    table = pa.table({"n": [1, 2]})
    tables = client.exchange(FETCH, {"keys": table})
    assert tables["keys"].equals(table)
    assert client.call(Health()) == HEALTH
    assert worker.seen == [("fetch_keys", encode(FETCH)), ("health", {})]


@pytest.mark.parametrize("kind", [WorkerError, FencedError, CheckpointError, EpochError])
def test_errors_of_a_worker_keep_their_kind_and_message(
    worker: Worker, client: WorkerClient, kind: type[AnabranchError]
) -> None:
    message = 'The key "a" {b}: no. :anabranch Do this.'
    worker.error = flight.FlightServerError(encode_error(kind(message)))
    with pytest.raises(kind) as caught:
        client.call(Health())
    assert type(caught.value) is kind
    assert str(caught.value) == message


@pytest.mark.parametrize("character", ["x", "%", '"', "ß", "\u2003", "🜁"])
@pytest.mark.parametrize("length", [1_500, 4_000, 9_000, 20_000, 1_000_000])
def test_errors_of_any_length_arrive_as_what_they_are(
    worker: Worker, client: WorkerClient, length: int, character: str
) -> None:
    worker.error = flight.FlightServerError(encode_error(EpochError(f"It is wrong: {character * length}. Do this.")))
    for ask in (lambda: client.call(Health()), lambda: list(client.stream(SCAN))):
        with pytest.raises(EpochError, match=r"^It is wrong: .*\. Do this\.$"):
            ask()
    worker.error = None
    assert client.call(Health()) == HEALTH


def test_what_flight_has_no_error_for_is_an_error_of_the_worker(worker: Worker, client: WorkerClient) -> None:
    worker.error = OSError("x" * 9_000)
    for ask in (lambda: client.call(Health()), lambda: list(client.stream(SCAN))):
        with pytest.raises(WorkerError, match=f"The state worker at {client.address} failed on"):
            ask()


def test_other_errors_name_the_worker_and_the_request(worker: Worker, client: WorkerClient) -> None:
    worker.error = KeyError("gone")
    with pytest.raises(WorkerError, match=f"The state worker at {client.address} failed on 'health': .*gone") as caught:
        client.call(Health())
    assert "\n" not in str(caught.value)


def test_a_worker_that_does_not_answer_in_time_is_lost(worker: Worker, client: WorkerClient) -> None:
    worker.awake.clear()
    with pytest.raises(LostWorkerError, match=f"{client.address} did not answer 'health' within 0.2 s.*requestTimeout"):
        client.call(Health(), timeout_s=0.2)


def test_a_worker_that_is_gone_is_lost(worker: Worker, client: WorkerClient) -> None:
    client.call(Health())
    worker.shutdown()
    with pytest.raises(LostWorkerError, match=f"{client.address} cannot be reached.*resumes from its checkpoint"):
        client.call(Health())


def test_a_worker_that_takes_the_place_of_one_that_is_gone_is_reached_at_once(
    worker: Worker, client: WorkerClient
) -> None:
    worker.shutdown()
    for _ in range(3):
        with pytest.raises(LostWorkerError):
            client.call(Health())
        with pytest.raises(LostWorkerError):
            list(client.stream(SCAN))
    with Worker(worker.port) as another:
        client.call(Health())
        assert [kind for kind, _ in another.seen] == ["health"]


def test_a_worker_that_ends_while_it_is_asked_is_lost(worker: Worker, client: WorkerClient) -> None:
    worker.error = flight.FlightCancelledError("CANCELLED")
    with pytest.raises(LostWorkerError, match=f"{client.address} cannot be reached.*resumes from its checkpoint"):
        client.call(Health())


def test_a_stream_gives_batches_and_then_the_error(worker: Worker, client: WorkerClient) -> None:
    assert [batch.num_rows for batch in client.stream(SCAN)] == [2]
    assert b'"kind":"scan"' in worker.seen[-1][1]["text"]
    worker.error = flight.FlightServerError(encode_error(EpochError("Epoch 2 is gone. Ask for a newer one.")))
    with pytest.raises(EpochError, match="Ask for a newer one"):
        list(client.stream(SCAN))


def test_connections_are_reused_until_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections()
    first = connections.get("127.0.0.1:1", timeout_s=5)
    assert connections.get("127.0.0.1:1", timeout_s=5) is first
    assert connections.get("127.0.0.1:2", timeout_s=5) is not first
    assert connections.get("127.0.0.1:1", timeout_s=5, credentials=Credentials("t")) is not first
    connections.forget("127.0.0.1:1")
    second = connections.get("127.0.0.1:1", timeout_s=5)
    assert second is not first
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert connections.get("127.0.0.1:1", timeout_s=5) is not second


def test_a_connection_that_another_thread_has_just_asked_for_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch after a long pause: all workers are asked at once, and each connection has been idle for long."""
    now_s, closed, got = [0.0], [], []
    monkeypatch.setattr("anabranch.wire.client.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    connections, addresses = Connections(), [f"127.0.0.1:{port}" for port in range(1, 5)]

    def ask_meanwhile() -> None:
        got.extend(connections.get(address, timeout_s=5.0) for address in addresses)

    def close(client: WorkerClient) -> None:
        closed.append(client)
        if not got:
            thread = threading.Thread(target=ask_meanwhile)
            thread.start()
            thread.join(20)

    for address in addresses:
        connections.get(address, timeout_s=5.0)
    monkeypatch.setattr(WorkerClient, "close", close)
    now_s[0] = 1000.0
    got_first = connections.get(addresses[0], timeout_s=5.0)
    assert [client.address for client in got] == addresses
    assert [client.address for client in closed] == addresses[1:]
    assert not any(client in closed for client in [got_first, *got])


def test_connections_that_nobody_asks_for_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, closed = [0.0], []
    monkeypatch.setattr("anabranch.wire.client.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(WorkerClient, "close", lambda self: closed.append(self.address))
    connections = Connections()
    first = connections.get("127.0.0.1:1", timeout_s=5.0)
    connections.get("127.0.0.1:2", timeout_s=5.0)
    patient = connections.get("127.0.0.1:3", timeout_s=1000.0)
    for now_s[0] in range(0, 1900, 100):
        assert connections.get("127.0.0.1:1", timeout_s=5.0) is first
    assert closed == ["127.0.0.1:2"], "a call with so much time may still run"
    assert connections.get("127.0.0.1:3", timeout_s=1000.0) is patient
    for number in range(100):  # workers come and go
        now_s[0] += 100
        connections.get(f"127.0.0.1:{1000 + number}", timeout_s=5.0)
    assert len(connections._clients) < 30
    assert len(connections._used_s) == len(connections._clients)
