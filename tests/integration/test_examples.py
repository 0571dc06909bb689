"""Every example runs, says what its docstring promises, and uses nothing but public names."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"
PUBLIC = {"anabranch", "anabranch.testing"}


@pytest.fixture(autouse=True, scope="module")
def _small(spark: SparkSession) -> Iterator[None]:
    """Queries that do not say otherwise have one worker and no HTTP API, and so start sooner."""
    small = {"spark.anabranch.workers": "1", "spark.anabranch.controlPort": "-1"}
    for name, value in small.items():
        spark.conf.set(name, value)
    yield
    for name in small:
        spark.conf.unset(name)


def example(name: str) -> ModuleType:
    """An example as a module. Tasks cannot import it: what it defines travels with them."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def test_sessions_are_the_same_with_windows_and_with_timers(spark: SparkSession) -> None:
    found = example("user_sessions").main(spark)
    sessions = [(row.user, f"{row.start:%H:%M}", f"{row.end:%H:%M}", row.clicks) for row in found["with_windows"]]
    assert sessions == [
        ("ann", "09:00", "09:55", 3),
        ("ann", "10:30", "11:01", 2),
        ("bob", "09:02", "10:10", 3),
        ("cyd", "09:45", "10:35", 3),
    ]
    assert found["with_timers"] == found["with_windows"]


def test_fraud_is_found_and_what_is_of_no_use_forgotten(spark: SparkSession) -> None:
    assert example("fraud_timers").main(spark) == {
        "alarms": [("1111", "900 soon after a tiny payment"), ("2222", "in ES, FR, PT within ten minutes")],
        "before": 5,
        "after": 1,
    }


def test_a_stream_of_joined_windows_says_what_a_batch_says(spark: SparkSession) -> None:
    found = example("windowed_join").main(spark)
    assert found["streamed"] == found["batch"]
    assert len(found["streamed"]) == 6
    assert all(0 < row.clicked < row.shown for row in found["streamed"])


def test_sketches_are_near_the_truth(spark: SparkSession) -> None:
    found = example("top_pages").main(spark)
    estimate, truth = found.pop("everybody")
    assert estimate == pytest.approx(truth, rel=0.1)
    for site in found.values():
        estimate, truth = site["visitors"]
        assert estimate == pytest.approx(truth, rel=0.2)
        assert site["top"][0] == site["top"][1]
        estimate, truth = site["quantiles"]
        assert estimate == pytest.approx(truth, rel=0.1)


def test_each_way_to_deduplicate_remembers_what_it_must(spark: SparkSession) -> None:
    assert example("deduplicate").main(spark) == {
        "dropDuplicates id": (600, 600),
        "dropDuplicates id, at": (750, 125),
        "dropDuplicatesWithinWatermark id": (600, 200),
    }


def test_a_program_moves_over_with_one_line(spark: SparkSession) -> None:
    found = example("migrate_a_spark_job").main(spark)
    assert found["kinds"] == ["pyspark.StreamingQuery", "anabranch.StreamQuery"]
    assert found["ours"] == found["native"]
    assert len(found["ours"]) > 10


def test_outliers_are_found_in_columns(spark: SparkSession) -> None:
    module = example("vectorised")
    assert [row.sensor for row in module.main(spark)] == module.FAULTY


def test_rules_change_from_one_micro_batch_to_the_next(spark: SparkSession) -> None:
    assert example("changing_rules").main(spark) == {
        "over": [["cyd"], ["bob"], ["ann"]],
        "rates": [("EUR", 1.0), ("USD", 1.1)],
        "limits": [("everybody", 150.0)],
    }


@pytest.mark.parametrize(("name", "least"), [("count_per_server", 1000), ("running_totals", 50)])
def test_a_generated_stream_is_worked_off(spark: SparkSession, name: str, least: int) -> None:
    assert example(name).main(spark, 3) >= least


def test_every_example_is_run_here_and_uses_public_names_only() -> None:
    here = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.stem}"' in here
        tree = ast.parse(path.read_text())
        assert f"examples/{path.name}" in (ast.get_docstring(tree) or ""), "the docstring does not say how to run it"
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
                private = {module for module in modules if module.startswith("anabranch")} - PUBLIC
                assert not private, f"{path.name} imports {private}"
