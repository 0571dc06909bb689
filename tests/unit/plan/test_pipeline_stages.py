"""How a query is cut into numbered stages, and how it is explained."""

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from anabranch.core.errors import UnsupportedError
from anabranch.core.ids import Epoch, StageNumber, WorkerId
from anabranch.core.routes import initial_route
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.engine.segments import Operation
from anabranch.plan.explain import explain_logical, explain_physical, explain_routes
from anabranch.plan.pipeline import Pipeline
from anabranch.plan.validation import check_output_mode, check_stage_options


class Rows:
    """Stands for a streaming DataFrame: remembers the operations that it went through."""

    def __init__(self, *operations: str) -> None:
        self.operations = operations

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: Rows(*self.operations, f"{method}{arguments}")


def stateful(number: int, name: str, parallelism: int | None = None) -> Any:
    variable = VariableSpec("tally", VariableKind.VALUE, pa.schema([("n", pa.int64())]))
    spec = StageSpec(StageNumber(number), name, pa.schema([("k", pa.string())]), (variable,))
    return SimpleNamespace(spec=spec, parallelism=parallelism)


def numbered(number: int, name: str) -> Any:
    """A stage that can get another number."""
    return SimpleNamespace(spec=stateful(number, name).spec, parallelism=None, numbered=numbered)


def source() -> Pipeline:
    pipeline = Pipeline(source=Rows(), stages=())  # type: ignore[arg-type]
    return pipeline.open_stage(None, None, opened=False, operations=("source",))


def shapes(pipeline: Pipeline) -> list[tuple[int, str, tuple[str, ...], bool]]:
    return [(stage.number, stage.name, stage.operations, stage.stateful) for stage in pipeline.stages]


def test_every_operation_is_a_stage_of_its_own() -> None:
    pipeline = source().with_stage("filter(x)").with_stage("groupBy(k).count()").with_stateful(stateful(2, "stage2"))
    assert shapes(pipeline.with_stage("select(k)")) == [
        (0, "stage0", ("source",), False),
        (1, "stage1", ("filter(x)",), False),
        (2, "stage2", ("groupBy(k).count()",), True),
        (3, "stage3", ("select(k)",), False),
    ]


def test_a_named_stage_takes_operations_up_to_a_stateful_one() -> None:
    pipeline = source().open_stage("clean", None).with_stage("filter(x)").with_stage("select(k)")
    pipeline = pipeline.with_stage("groupBy(k).count()").with_stateful(stateful(1, "clean")).with_stage("filter(y)")
    assert shapes(pipeline)[1:] == [
        (1, "clean", ("filter(x)", "select(k)", "groupBy(k).count()"), True),
        (2, "stage2", ("filter(y)",), False),
    ]


def test_operations_go_to_spark_before_the_first_stateful_stage_and_are_recorded_after_it() -> None:
    pipeline = source().with_operation(Operation("filter", ("x",)))
    assert pipeline.source.operations == ("filter('x',)",)
    pipeline = pipeline.with_stateful(stateful(0, "a")).with_operation(Operation("select", ("k",)))
    pipeline = pipeline.with_stateful(stateful(0, "b")).with_operation(Operation("filter", ("y",)))
    assert pipeline.source.operations == ("filter('x',)",)
    assert [[str(operation) for operation in segment.after] for segment in pipeline.segments] == [
        ["select('k')"],
        ["filter('y')"],
    ]
    assert [stage.spec.name for stage in pipeline.stateful_stages] == ["a", "b"]


def test_pipelines_do_not_change() -> None:
    base = source().with_stage("groupBy(k).count()").with_stateful(stateful(1, "stage1"))
    before = shapes(base)
    base.with_operation(Operation("filter", ("y",))).with_stage("filter(y)").open_stage("late", 3)
    assert shapes(base) == before
    assert base.segments[0].after == ()


def test_plans_are_explained() -> None:
    pipeline = source().open_stage("clean", 4).with_stage("filter(x)")
    pipeline = pipeline.with_stage("groupBy(k).count()").with_stateful(stateful(1, "clean", parallelism=4))
    pipeline = pipeline.with_operation(Operation("coalesce", (1,))).with_stage("coalesce(1)")
    logical = "\n".join(explain_logical(pipeline, "console"))
    assert "*1 'clean' parallelism=4: filter(x) -> groupBy(k).count()" in logical
    assert " 2: coalesce(1)" in logical
    assert "'sink': console" in logical
    now: dict[str, Any] = {"parallelism": {1: 7}, "store": "memory", "key_groups": 1024}
    physical = "\n".join(explain_physical(pipeline, workers=3, **now))
    assert "Stage 1 'clean': repartitionById(7) by key group of [k: string]" in physical
    assert "state 'tally' (value) [n: int64]" in physical
    assert "then coalesce(1)" in physical
    assert "output materialised" in physical
    assert "3 workers, store memory, 1024 key groups" in physical
    assert "State: 1 worker, store" in explain_physical(pipeline, workers=1, **now)[-1]
    route = initial_route([WorkerId("w1"), WorkerId("w2")], 10, Epoch(3))
    assert explain_routes(route, [("w1", "a:1"), ("w2", "a:2")])[1:] == [
        f"version {route.version}, from epoch 3",
        "  w1 at a:1: 5 key groups",
        "  w2 at a:2: 5 key groups",
    ]
    assert "not been started" in explain_routes(None, [])[1]


@pytest.mark.parametrize(
    ("name", "parallelism", "message"),
    [
        ("", None, "not empty"),
        ("a", None, "a stage 'a' already"),
        ("b", 0, "between 1 and"),
        ("b", 10**9, "between 1 and"),
    ],
)
def test_stage_options_are_checked(name: str, parallelism: int | None, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_stage_options(name, parallelism, ["a"])
    check_stage_options("b", 3, ["a"])


def test_modes_of_queries_without_aggregation() -> None:
    processing = source().with_stateful(stateful(0, "stage0"))
    for mode in ("append", "update"):
        check_output_mode(source(), mode)
        check_output_mode(processing, mode)
    for pipeline in (source(), processing):
        with pytest.raises(UnsupportedError, match="complete needs an aggregation"):
            check_output_mode(pipeline, "complete")
        with pytest.raises(UnsupportedError, match="Unknown output mode"):
            check_output_mode(pipeline, "replace")


def test_streams_meet_in_a_stage_that_is_numbered_after_those_of_both() -> None:
    left = source().with_stage("count()").with_stateful(numbered(1, "stage1")).open_stage("both", None)
    right = source().with_stage("filter(x)").open_stage("sums", None)
    right = right.with_stage("sum()").with_stateful(numbered(2, "sums")).with_stage("count()")
    right = right.with_stateful(numbered(3, "stage3"))
    both, inputs = left.meeting(right, "join(on k)")
    assert inputs == (0, 2)
    assert shapes(both) == [
        (0, "stage0", ("source",), False),
        (1, "stage1", ("count()",), True),
        (2, "stage2", ("source",), False),
        (3, "stage3", ("filter(x)",), False),
        (4, "sums", ("sum()",), True),
        (5, "stage5", ("count()",), True),
        (6, "both", ("join(on k)",), False),
    ]
    assert [(stage.spec.number, stage.spec.name) for stage in both.stateful_stages] == [
        (1, "stage1"),
        (4, "sums"),
        (5, "stage5"),
    ]
    met = both.with_stateful(numbered(6, "both"), inputs=inputs)
    assert [segment.feeders(i) for i, segment in enumerate(met.segments)] == [(), (), (1,), (0, 2)]
    assert "*6 'both' after 1 and 5: join(on k)" in explain_logical(met, None)
    again, inputs = source().meeting(met, "join(on k)")
    assert inputs == (again.source, 3)
    assert [segment.feeders(i) for i, segment in enumerate(again.segments)] == [(), (), (1,), (0, 2)]
    assert [stage.follows for stage in again.stages if stage.follows] == [(2, 6), (0, 7)]
