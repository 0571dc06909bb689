"""The epoch loop with everything around it replaced: what is called in which order, and what happens on a failure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET
from pyspark.sql.types import StringType, StructField, StructType

from anabranch.core.errors import EpochError, FencedError
from anabranch.core.reports import EpochReport
from anabranch.engine.loop import EpochLoop
from anabranch.engine.segments import Operation, Segment
from anabranch.engine.stages import StageClock
from support.epoch_reports import epoch_report


class Rows:
    """Stands for a DataFrame: notes what is done to it in a journal that all share."""

    def __init__(self, journal: list[str], name: str = "rows", settings: dict[str, str] | None = None) -> None:
        self.journal = journal
        self.name = name
        #: Those of the session, which is another one if they are another object.
        settings = {} if settings is None else settings
        conf = SimpleNamespace(set=settings.__setitem__, get=settings.get)
        context = SimpleNamespace(setLocalProperty=self._announce)
        self.schema = StructType([StructField("text", StringType())])
        session = SimpleNamespace(settings=settings)
        self.sparkSession = SimpleNamespace(conf=conf, sparkContext=context, _jvm=None, _jsparkSession=session)
        # A plan that is no chain of operations on the rows, so that no template is made of it.
        plan = SimpleNamespace(equals=lambda _: False, children=lambda: SimpleNamespace(size=lambda: 2))
        self._jdf = SimpleNamespace(queryExecution=lambda: SimpleNamespace(toRdd=lambda: self, analyzed=lambda: plan))

    def _announce(self, name: str, text: str) -> None:
        del name
        if done := json.loads(text)["done"]:
            self.journal.append(f"done {done}")

    def count(self) -> int:
        self.journal.append(f"run {self.name}")
        return 0

    def persist(self) -> "Rows":
        return Rows(self.journal, f"kept {self.name}")

    def unpersist(self) -> None:
        self.journal.append(f"release {self.name}")

    def filter(self, text: str) -> "Rows":
        return Rows(self.journal, f"{self.name}|{text}")

    coalesce = filter

    def drop(self, *_: str) -> "Rows":
        return self


@dataclass(frozen=True)
class Stage:
    """Stands for a stateful stage."""

    number: int
    parallelism: int | None = None

    @property
    def spec(self) -> Any:
        return SimpleNamespace(number=self.number)

    @property
    def clock(self) -> StageClock:
        return StageClock.NONE

    @property
    def output_delay_ms(self) -> int:
        return 0

    def project(self, rows: Rows, side: int = 0, *, carry: bool = False) -> Rows:
        del side, carry
        return Rows(rows.journal, f"{rows.name}>")

    def apply(self, rows: Rows, access: Any, context: Any) -> Rows:
        del access, context
        return Rows(rows.journal, f"s{self.number}({rows.name})")

    def variant(self, context: Any) -> str:
        del context
        return "the only one"


@dataclass(frozen=True)
class Access:
    parallelism: int = 3


@dataclass
class Control:
    """Stands for the coordinator."""

    journal: list[str]
    #: What `missing` answers, one after another; then nothing is missing.
    gaps: list[Mapping[int, frozenset[int]]] = field(default_factory=list)
    #: What `recover` answers, one after another; then no worker is to blame.
    recoveries: list[bool] = field(default_factory=list)
    newer_driver: FencedError | None = None

    committed_epoch: int = -1
    worker_count: int = 1
    durable_epoch: int = 1_000

    def begin(self, epoch: int) -> int:
        self.journal.append(f"begin {epoch}")
        return 0

    def accesses(self) -> Mapping[int, Access]:
        return {1: Access(), 2: Access()}

    def missing(self, epoch: int) -> Mapping[int, frozenset[int]]:
        del epoch
        return self.gaps.pop(0) if self.gaps else {}

    def commit(self, epoch: int) -> EpochReport:
        self.journal.append(f"commit {epoch}")
        return epoch_report(epoch, changed_rows=7)

    def abort(self, epoch: int) -> None:
        self.journal.append(f"abort {epoch}")

    def lost_lately(self, changes: int) -> list[str]:
        return ["worker-1"] * changes

    def fenced(self) -> FencedError | None:
        return self.newer_driver

    def recover(self, epoch: int) -> bool:
        del epoch
        return self.recoveries.pop(0) if self.recoveries else False


@dataclass
class Output:
    """Stands for a sink."""

    journal: list[str]
    reads_once: bool = True
    errors: list[Exception] = field(default_factory=list)

    def write(self, rows: Rows, epoch: int) -> None:
        del epoch
        self.journal.append(f"write {rows.name}")
        if self.errors:
            raise self.errors.pop(0)


class Facts:
    stopped = False

    def batch_time_ms(self) -> int:
        return 7

    def watermark_ms(self) -> int | None:
        return 5

    late_ms: int | None = None

    def late_watermark_ms(self) -> int | None:
        return self.late_ms

    def previous_rows(self, epoch: int) -> int | None:
        return epoch or None

    def is_stopped(self) -> bool:
        return self.stopped

    def has_new_rows(self) -> bool:
        return True


def make(
    *operations: Operation, stages: int = 1, reads_once: bool = True, errors: Sequence[Exception] = ()
) -> tuple[EpochLoop, Control]:
    journal: list[str] = []
    control = Control(journal)
    segments = [Segment(Stage(number)) for number in range(1, stages)] + [Segment(Stage(stages), operations)]
    sink = Output(journal, reads_once, list(errors))
    loop = EpochLoop(segments, control, sink, complete=False, shuffle_partitions=2, stream=Facts())  # type: ignore[arg-type]
    return loop, control


def run(loop: EpochLoop, control: Control, epoch: int = 0) -> list[str]:
    loop(Rows(control.journal), epoch)  # type: ignore[arg-type]
    return control.journal


def test_the_sink_writes_before_the_commit() -> None:
    assert run(*make()) == ["begin 0", "write s1(rows)", "commit 0"]


@dataclass
class Late:
    """Stands for what becomes of late rows: it is the sink as well, and finds as many of them as it is told."""

    journal: list[str]
    count: int
    kinds: Mapping[int, Any]

    @property
    def sink(self) -> "Late":
        return self

    def of(self, inputs: Mapping[int, Rows], epoch: Any) -> Any:
        del epoch
        journal = self.journal
        journal.append(f"look in {[rows.name for rows in inputs.values()]}")
        counted = SimpleNamespace(toRdd=lambda: SimpleNamespace(count=lambda: self.count))
        return SimpleNamespace(_jdf=SimpleNamespace(queryExecution=lambda: counted)) if inputs else None

    def write(self, rows: Any, epoch: int) -> None:
        del rows
        self.journal.append(f"late {epoch}")

    def write_none(self, spark: Any, epoch: int) -> None:
        del spark
        self.journal.append(f"none late {epoch}")


def with_late(count: int, *, watched: int, stages: int = 1, late_ms: int | None = 3) -> tuple[EpochLoop, Control]:
    loop, control = make(stages=stages)
    loop._late = Late(control.journal, count, {watched: ()})  # type: ignore[assignment]
    loop._stream.late_ms = late_ms  # type: ignore[attr-defined]
    return loop, control


def test_late_rows_are_written_after_the_sinks_and_before_the_commit() -> None:
    loop, control = with_late(2, watched=1)
    found = run(loop, control)
    look = ["look in ['rows']", "late 0", "release kept rows"]
    assert found == ["begin 0", "write s1(rows)", *look, "commit 0"]
    assert loop.reports[-1].late_rows == 2


def test_an_epoch_without_late_rows_takes_back_those_of_an_earlier_run() -> None:
    found = run(*with_late(0, watched=1))
    assert found[2:] == ["look in ['rows']", "none late 0", "release kept rows", "commit 0"]


def test_input_of_a_later_stage_is_computed_once_for_its_logic_and_its_late_rows() -> None:
    found = run(*with_late(1, watched=2, stages=2))
    kept = "kept s1(rows)>"
    assert found == [
        "begin 0", f"run {kept}", f"write s2({kept})", f"look in ['{kept}']", "late 0", f"release {kept}", "commit 0",
    ]  # fmt: skip


def test_nothing_is_kept_before_there_is_a_watermark() -> None:
    found = run(*with_late(1, watched=2, stages=2, late_ms=None))
    assert found == ["begin 0", "write s2(s1(rows)>)", "look in []", "none late 0", "commit 0"]


def test_operations_that_read_once_stay_lazy_for_a_sink_that_reads_once() -> None:
    assert run(*make(Operation("filter", ("x",)))) == ["begin 0", "write s1(rows)|x", "commit 0"]


def test_a_result_is_kept_for_a_sink_that_may_read_it_again() -> None:
    found = run(*make(Operation("filter", ("x",)), reads_once=False))
    assert found == ["begin 0", "run kept s1(rows)|x", "write kept s1(rows)|x", "release kept s1(rows)|x", "commit 0"]


def test_a_stage_is_run_on_its_own_before_operations_that_merge_partitions() -> None:
    found = run(*make(Operation("coalesce", ("1",))))
    assert found == ["begin 0", "run kept s1(rows)", "write kept s1(rows)|1", "release kept s1(rows)", "commit 0"]


def test_the_first_stage_is_projected_by_the_streaming_query_and_others_by_the_loop() -> None:
    assert run(*make(stages=2)) == ["begin 0", "write s2(s1(rows)>)", "commit 0"]


def test_what_the_sink_did_not_run_is_run_before_the_commit() -> None:
    loop, control = make(stages=2)
    control.gaps = [{1: frozenset({0}), 2: frozenset({1, 2})}, {1: frozenset({0})}]
    assert run(loop, control) == [
        "begin 0",
        "write s2(s1(rows)>)",
        "done [[2, [0]]]",
        "run s2(s1(rows)>)",
        "done [[1, [1, 2]]]",
        "run s1(rows)",
        "commit 0",
    ]


def test_an_epoch_that_cannot_be_completed_is_aborted() -> None:
    loop, control = make(reads_once=False)
    control.gaps = [{1: frozenset({2})}] * 9
    with pytest.raises(
        EpochError, match=r"Epoch 4 cannot be completed.*\{1: frozenset\(\{2\}\)\}.*Start the query again"
    ):
        run(loop, control, epoch=4)
    assert control.journal[-2:] == ["release kept s1(rows)", "abort 4"]
    assert "commit 4" not in control.journal


def test_a_sink_that_fails_aborts_the_epoch_and_is_remembered() -> None:
    error = ValueError("full")
    loop, control = make(errors=[error])
    with pytest.raises(ValueError, match="full"):
        run(loop, control)
    assert control.journal == ["begin 0", "write s1(rows)", "abort 0"]
    assert loop.error is error
    assert loop.running.acquire(blocking=False)


def test_each_session_is_configured_that_epochs_run_in() -> None:
    """Epochs that are repeated after a crash run in queries, and so in sessions, of their own."""
    loop, control = make()
    sessions: list[dict[str, str]] = [{}, {"spark.sql.optimizer.excludedRules": "theirs"}]
    for epoch, settings in enumerate([sessions[0], sessions[1], sessions[0]]):
        loop(Rows(control.journal, settings=settings), epoch)  # type: ignore[arg-type]
    for settings in sessions:
        assert settings["spark.sql.adaptive.enabled"] == "false"
    omits_empty = "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation"
    rules = [settings["spark.sql.optimizer.excludedRules"] for settings in sessions]
    assert rules == [omits_empty, f"{omits_empty},theirs"]


def test_each_epoch_leaves_a_report() -> None:
    loop, control = make()
    run(loop, control, 0)
    run(loop, control, 1)
    reports = list(loop.reports)
    assert [report.epoch for report in reports] == [0, 1]
    assert reports[1].changed_rows == 7
    assert reports[1].watermark_ms == 5
    assert reports[1].late_rows is UNSET
    assert list(reports[1].duration_ms) == ["begin", "plan", "sink", "complete", "commit"]


def test_an_epoch_waits_where_spark_can_interrupt_it_while_the_query_is_being_stopped() -> None:
    loop, control = make()
    waits: list[int] = []

    def sleep(interval_ms: int) -> None:
        waits.append(interval_ms)
        if len(waits) == 3:
            raise InterruptedError("Spark stops the query")

    rows = Rows(control.journal)
    rows.sparkSession._jvm = SimpleNamespace(
        java=SimpleNamespace(lang=SimpleNamespace(Thread=SimpleNamespace(sleep=sleep)))
    )
    with loop.running, pytest.raises(InterruptedError):
        loop(rows, 0)  # type: ignore[arg-type]
    assert len(waits) == 3
    assert control.journal == []
    assert loop.error is None


def test_an_epoch_stops_waiting_when_the_query_is_stopped_though_nobody_interrupts_it() -> None:
    """Spark interrupts once, and who waits for a source may have caught that."""
    loop, control = make()
    waits: list[int] = []

    def sleep(interval_ms: int) -> None:
        waits.append(interval_ms)
        loop._stream.stopped = len(waits) == 2  # type: ignore[attr-defined]

    rows = Rows(control.journal)
    rows.sparkSession._jvm = SimpleNamespace(
        java=SimpleNamespace(lang=SimpleNamespace(Thread=SimpleNamespace(sleep=sleep)))
    )
    with loop.running, pytest.raises(Exception, match=r"java\.lang\.InterruptedException"):
        loop(rows, 0)  # type: ignore[arg-type]
    assert len(waits) == 2
    assert control.journal == []


def test_an_epoch_runs_again_when_a_worker_was_lost() -> None:
    loop, control = make(errors=[RuntimeError("the task failed"), RuntimeError("and again")])
    control.recoveries = [True, True]
    assert run(loop, control) == [
        *("begin 0", "write s1(rows)", "abort 0"),
        *("begin 0", "write s1(rows)", "abort 0"),
        *("begin 0", "write s1(rows)", "commit 0"),
    ]
    assert loop.error is None


def test_an_epoch_does_not_run_again_for_ever_nor_after_a_newer_driver_took_over() -> None:
    many: tuple[list[Exception], type[Exception], str] = (
        [RuntimeError("the task failed")] * 9,
        EpochError,
        r"Epoch 0 was run 5 times, and each time workers were lost \(worker-1, .*the task failed.*see their logs",
    )
    newer = [FencedError("A newer driver has taken over.")], FencedError, "newer driver"
    for errors, kind, message in (many, newer):
        loop, control = make(errors=errors)
        control.recoveries = [True] * 9
        with pytest.raises(kind, match=message):
            run(loop, control)
        assert control.journal.count("begin 0") == (5 if len(errors) > 1 else 1)
        assert "commit 0" not in control.journal


def test_whatever_fails_after_a_newer_driver_took_over_is_put_down_to_that() -> None:
    """It clears away what this one was writing."""
    missing = FileNotFoundError("part-0 is gone")
    loop, control = make(errors=[missing])
    control.recoveries = [True]
    control.newer_driver = FencedError("A newer driver has taken over.")
    with pytest.raises(FencedError) as caught:
        run(loop, control)
    assert caught.value.__cause__ is missing
    assert loop.error is control.newer_driver
    assert control.journal.count("begin 0") == 1
