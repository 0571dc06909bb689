"""What a rescale did to a run is read off each row's own times."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.demo.meter import EpochFigures, RescaleFigures
from anabranch.demo.outcome import output_times, phases
from anabranch.workload.latency import Latencies

START_MS = 1_700_000_000_000
END_MS = START_MS + 40_000


def rescale_of(asked_ms: int, ended_ms: int | None) -> RescaleFigures:
    return RescaleFigures(
        number=1,
        what="4 workers",
        state="migrating" if ended_ms is None else "done",
        asked_ms=START_MS + asked_ms,
        ended_ms=None if ended_ms is None else START_MS + ended_ms,
        first_epoch=7,
        groups_moving=512,
    )


def run_of(ends_ms: list[int]) -> tuple[Latencies, list[EpochFigures]]:
    """Epochs that follow each other at once; a row arrives every 100 ms and is in the next epoch that begins."""
    came, done, epochs, began_ms = [], [], [], 0
    arrivals = iter(range(0, ends_ms[-1], 100))
    waiting: list[int] = []
    upcoming = next(arrivals)
    for number, end_ms in enumerate(ends_ms):
        while upcoming <= began_ms:
            waiting.append(upcoming)
            upcoming = next(arrivals, 10**9)
        came += waiting
        done += [end_ms] * len(waiting)
        rows = len(waiting)
        epochs.append(EpochFigures(number, (START_MS + end_ms) / 1000, end_ms - began_ms, rows, rows))
        waiting, began_ms = [], end_ms
    came_ms, done_ms = np.array(came, np.int64), np.array(done, np.int64)
    return Latencies(START_MS + came_ms, done_ms - came_ms), epochs


def test_rows_on_their_way_during_a_rescale_belong_to_it() -> None:
    # Epochs of 500 ms; the one from 10,000 on takes 1,500.
    ends_ms = [*range(500, 10_001, 500), *range(11_500, 20_001, 500)]
    latencies, epochs = run_of(ends_ms)
    (found,) = phases(latencies, epochs, [rescale_of(9_800, 11_600)], end_ms=END_MS)
    # The first output after 11,600 is at 12,000.
    assert found.ended_ms == START_MS + 12_000
    assert (found.median_epoch_before_ms, found.slowest_epoch_during_ms) == (500, 1500)
    assert (found.median_gap_before_ms, found.longest_gap_during_ms) == (500, 1500)
    # From 5 s on until 9,500 when the last output before the rescale came, with rows that had arrived by 9,000.
    assert found.before == {"count": 41, "p50_ms": 700, "p95_ms": 900, "p99_ms": 900, "max_ms": 900}
    assert (found.during["count"], found.during["max_ms"]) == (30, 1900)
    assert found.after["max_ms"] == 900
    assert sum(part["count"] for part in (found.before, found.during, found.after)) == np.sum(
        latencies.ingestion_ms >= START_MS + 5000
    )


def test_a_standstill_between_epochs_is_a_gap_though_no_epoch_is_slow() -> None:
    latencies, epochs = run_of([*range(500, 10_001, 500), *range(16_000, 20_001, 500)])
    # A restart: nothing runs from 10,000 to 15,500, and the epoch that follows takes no longer than others.
    epochs = [e if e.duration_ms == 500 else EpochFigures(e.epoch, e.ended_s, 500, 1, 1) for e in epochs]
    (found,) = phases(latencies, epochs, [rescale_of(10_000, 15_400)], end_ms=END_MS)
    assert (found.slowest_epoch_during_ms, found.longest_gap_during_ms) == (500, 6000)
    assert found.ended_ms == START_MS + 16_000
    assert found.during["max_ms"] > 6000


def test_each_of_several_rescales_has_its_own_time_around_it() -> None:
    latencies, epochs = run_of(list(range(500, 30_001, 500)))
    first, second = phases(latencies, epochs, [rescale_of(10_000, 11_000), rescale_of(20_000, None)], end_ms=END_MS)
    assert first.ended_ms == START_MS + 11_000
    assert first.after["count"] + first.during["count"] + first.before["count"] <= 151
    assert second.ended_ms is None
    # One that does not end lasts to the end of the run.
    assert second.after["count"] == 0
    assert second.before["count"] > 80
    # The last output was ten seconds before the end.
    assert (first.longest_gap_during_ms, second.longest_gap_during_ms) == (500, 10_000)


def test_a_rescale_that_comes_soon_is_compared_with_what_there_is() -> None:
    latencies, epochs = run_of(list(range(500, 8_001, 500)))
    (found,) = phases(latencies, epochs, [rescale_of(3_000, 3_500)], end_ms=END_MS)
    assert found.before["count"] > 0
    assert found.median_epoch_before_ms == 500


def test_a_run_without_output_has_no_figures() -> None:
    nothing = Latencies(np.empty(0, np.int64), np.empty(0, np.int64))
    (found,) = phases(nothing, [], [rescale_of(0, None)], end_ms=END_MS)
    assert (found.during, found.ended_ms, found.longest_gap_during_ms) == ({"count": 0}, None, None)
    assert phases(nothing, [], [], end_ms=END_MS) == ()


@settings(deadline=None)
@given(st.lists(st.integers(10, 3000), min_size=2, max_size=40), st.data())
def test_no_row_on_its_way_during_a_rescale_is_left_out_of_it(durations_ms: list[int], data: st.DataObject) -> None:
    latencies, epochs = run_of(np.cumsum(durations_ms).tolist())
    end_ms = sum(durations_ms)
    asked_ms = data.draw(st.integers(0, end_ms))
    ended_ms = data.draw(st.integers(asked_ms, end_ms))
    (found,) = phases(latencies, epochs, [rescale_of(asked_ms, ended_ms)], end_ms=END_MS)
    came, done = latencies.ingestion_ms - START_MS, latencies.processed_ms - START_MS
    under_way = (done >= asked_ms) & (came <= ended_ms)
    assert found.during["count"] >= np.sum(under_way)
    if under_way.any():
        assert found.during["max_ms"] >= latencies.latency_ms[under_way].max()
    parts = (found.before, found.during, found.after)
    assert sum(part["count"] for part in parts) <= len(came)
    assert found.longest_gap_during_ms is not None


def test_rows_of_an_epoch_are_one_output_whatever_the_rounding() -> None:
    latencies = Latencies(np.array([0, 0, 0, 500]), np.array([999, 1000, 5000, 1000]))
    assert output_times(latencies).tolist() == [999, 1500, 5000]
