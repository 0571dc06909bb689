"""Latency lines: written, read back, summed up and drawn."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from anabranch.core.errors import AnabranchError
from anabranch.workload import Latencies, append_latencies, per_second, plot_latency, read_latencies
from anabranch.workload.latency import summary, throughput

START_MS = 1_700_000_000_000


def latencies_of(*pairs: tuple[int, int]) -> Latencies:
    return Latencies(*np.array(pairs, dtype=np.int64).reshape(-1, 2).T)


def test_lines_have_a_header_once_and_whole_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    append_latencies(path, latencies_of((START_MS, 5), (START_MS + 1, 17)))
    append_latencies(path, latencies_of((START_MS + 2, 0)))
    text = f"ingestion_time_ms,latency_ms\n{START_MS},5\n{START_MS + 1},17\n{START_MS + 2},0\n"
    assert path.read_text() == text


def test_lines_are_read_back_from_a_file_and_from_a_directory(tmp_path: Path) -> None:
    append_latencies(tmp_path / "b.csv", latencies_of((START_MS + 9, 3)))
    append_latencies(tmp_path / "a.csv", latencies_of((START_MS, 1), (START_MS + 5, 2)))
    (tmp_path / "notes.txt").write_text("not lines")
    assert read_latencies(tmp_path / "b.csv").latency_ms.tolist() == [3]
    both = read_latencies(tmp_path)
    assert both.ingestion_ms.tolist() == [START_MS, START_MS + 5, START_MS + 9]
    assert both.latency_ms.tolist() == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "ingestion_time_ms,latency_ms\nx,2\n"])
def test_a_file_without_latency_lines_is_explained(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(AnabranchError, match="Give a file with the header ingestion_time_ms,latency_ms"):
        read_latencies(tmp_path / "x.csv")


def test_missing_lines_are_explained(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(AnabranchError, match="There are no latency lines"):
            read_latencies(path)


def test_latencies_come_from_two_columns_of_any_unit() -> None:
    arrived = pa.chunked_array([pa.array([1_000_000, 2_500_999], pa.timestamp("us", "UTC"))])
    done = pa.array([1_250, 2_501], pa.timestamp("ms", "UTC"))
    latencies = Latencies.between(arrived, done)
    assert latencies.ingestion_ms.tolist() == [1000, 2500]
    assert latencies.latency_ms.tolist() == [250, 0]
    at_once = Latencies.between(arrived, datetime.fromtimestamp(3, UTC))
    assert at_once.latency_ms.tolist() == [2000, 499]


def test_percentiles_are_values_that_occurred() -> None:
    latencies = latencies_of(*((START_MS, value) for value in range(1, 101)))
    assert summary(latencies) == {"count": 100, "p50_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}
    assert summary(latencies_of((START_MS, 7))) == {"count": 1, "p50_ms": 7, "p95_ms": 7, "p99_ms": 7, "max_ms": 7}
    assert summary(latencies_of()) == {"count": 0}


def test_seconds_are_those_of_arrival_or_of_processing() -> None:
    latencies = latencies_of((START_MS + 10, 100), (START_MS + 900, 300), (START_MS + 2000, 1))
    by_arrival = per_second(latencies).to_pydict()
    assert by_arrival["time_ms"] == [START_MS, START_MS + 2000]
    assert by_arrival["count"] == [2, 1]
    assert by_arrival["p50_ms"] == [100, 1]
    assert by_arrival["max_ms"] == [300, 1]
    by_processing = per_second(latencies, by="processed").to_pydict()
    assert by_processing["time_ms"] == [START_MS, START_MS + 1000, START_MS + 2000]
    assert by_processing["count"] == [1, 1, 1]


@settings(deadline=None)
@given(
    arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 5000)),
    st.randoms(use_true_random=False),
)
def test_seconds_agree_with_a_plain_count(values: np.ndarray, random: object) -> None:
    offsets = np.array([random.randrange(3000) for _ in values], dtype=np.int64)  # type: ignore[attr-defined]
    table = per_second(Latencies(START_MS + offsets, values)).to_pylist()
    assert sum(row["count"] for row in table) == len(values)
    for row in table:
        mine = np.sort(values[(START_MS + offsets) // 1000 * 1000 == row["time_ms"]])
        assert row["count"] == len(mine)
        assert row["max_ms"] == mine[-1]
        for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99)):
            assert row[name] == np.percentile(mine, share * 100, method="inverted_cdf")


def test_seconds_without_rows_count_as_zero() -> None:
    times_ms = np.array([5000, 5999, 8000])
    assert throughput(times_ms, first_s=4, last_s=9).tolist() == [0, 2, 0, 0, 1, 0]


@pytest.mark.parametrize("standstill_ms", [0, 5000])
def test_a_run_is_drawn_with_its_events(tmp_path: Path, standstill_ms: int) -> None:
    from matplotlib.image import imread

    arrived = START_MS + np.arange(0, 30_000, 5)
    waited = np.where((arrived > START_MS + 10_000) & (arrived < START_MS + 15_000), standstill_ms, 0)
    append_latencies(tmp_path / "lines.csv", Latencies(arrived, waited + arrived % 37 + 10))
    plot_latency(tmp_path / "lines.csv", tmp_path / "plain.png")
    events = [(START_MS + 10_000, "rescale"), (START_MS + 10_500, "drained"), (START_MS + 11_000, "left")]
    plot_latency(tmp_path / "lines.csv", tmp_path / "marked.png", events, title="A run")
    plain, marked = imread(tmp_path / "plain.png"), imread(tmp_path / "marked.png")
    assert plain.shape == marked.shape == (960, 1650, 4)
    purple = np.array([0x6A, 0x4C, 0x93]) / 255
    hits = [(np.abs(image[:, :, :3] - purple).max(axis=2) < 0.02).sum() for image in (plain, marked)]
    assert hits[0] == 0
    assert hits[1] > 500


def test_events_before_the_first_row_and_after_the_last_are_drawn_too(tmp_path: Path) -> None:
    append_latencies(tmp_path / "lines.csv", latencies_of((START_MS, 5), (START_MS + 900, 7)))
    events = [
        (START_MS - 3000, "a rescale that was asked for early"),
        (START_MS + 9000, "done long after the last row"),
    ]
    plot_latency(tmp_path / "lines.csv", tmp_path / "plot.svg", events, title="A run")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f"<!-- {label} -->" in drawn for _, label in events)


def test_drawing_leaves_the_callers_matplotlib_alone(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    append_latencies(tmp_path / "lines.csv", latencies_of((START_MS, 5)))
    plot_latency(tmp_path / "lines.csv", tmp_path / "plot.png")
    assert plt.get_fignums() == []


def test_without_matplotlib_a_picture_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    append_latencies(tmp_path / "lines.csv", latencies_of((START_MS, 5)))
    with pytest.raises(AnabranchError, match=r"Install it with: pip install 'anabranch\[plots\]'\.$"):
        plot_latency(tmp_path / "lines.csv", tmp_path / "plot.png")


def test_a_header_alone_cannot_be_drawn(tmp_path: Path) -> None:
    append_latencies(tmp_path / "lines.csv", latencies_of())
    with pytest.raises(AnabranchError, match="Let the query process some rows first"):
        plot_latency(tmp_path / "lines.csv", tmp_path / "plot.png")


def test_lines_of_two_runs_years_apart_are_not_drawn_together(tmp_path: Path) -> None:
    append_latencies(tmp_path / "lines.csv", latencies_of((0, 5), (START_MS, 5)))
    with pytest.raises(AnabranchError, match="lines of one run only"):
        plot_latency(tmp_path / "lines.csv", tmp_path / "plot.png")
