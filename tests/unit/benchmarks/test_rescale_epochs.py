"""What the benchmark of rescales makes of epochs: which were before, during and after, gaps, and how late rows were."""

import dataclasses
from collections.abc import Sequence

import pytest
from bench.harness import BenchmarkError
from bench.rescale_epochs import Epoch, Move, Phases, caught_up_ms, describe, divide, output_gap_ms

#: A rescale of two and a half seconds.
MOVE = Move("2 to 4", call_s=10.25, done_s=12.75, facts={"rowsFetched": 7})


def epoch(number: int, *, end_s: float, ms: float = 200.0, came_s: Sequence[float] = ()) -> Epoch:
    """One whose rows came in the second before it began, unless told otherwise."""
    start_s = end_s - ms / 1000
    return Epoch(number, start_s, end_s, rows=100, came_s=tuple(came_s) or (start_s - 1.0, start_s - 0.5, start_s))


def regular(first: int, last: int) -> list[Epoch]:
    """An output every second, from one second to another."""
    return [epoch(second, end_s=float(second)) for second in range(first, last + 1)]


def phases_of(epochs: Sequence[Epoch], move: Move = MOVE) -> Phases:
    return divide(epochs, move, from_s=0.0, until_s=100.0)


def numbers(epochs: Sequence[Epoch]) -> list[int]:
    return [each.number for each in epochs]


def test_epochs_are_divided_by_whether_a_row_was_under_way_during_the_rescale() -> None:
    phases = divide(regular(1, 20), MOVE, from_s=6.0, until_s=18.0)
    assert numbers(phases.before) == [6, 7, 8, 9, 10], "those that ended within the time that counts"
    # The rows of epoch 13 came from 11.8 s on, those of epoch 14 from 12.8 s on: after the end at 12.75 s.
    assert numbers(phases.during) == [11, 12, 13]
    assert numbers(phases.after) == [14, 15, 16, 17, 18], "those that ended while it was watched"


def test_an_epoch_that_ends_with_the_call_was_before_and_one_whose_rows_came_by_the_end_was_during() -> None:
    move = dataclasses.replace(MOVE, call_s=10.0, done_s=12.75)
    late = epoch(14, end_s=14.0, came_s=[12.75, 13.5])
    phases = phases_of([*regular(1, 13), late, *regular(15, 16)], move)
    assert numbers(phases.before)[-1] == 10
    assert numbers(phases.during) == [11, 12, 13, 14]


def test_a_single_epoch_may_be_under_way_all_the_time() -> None:
    long = epoch(11, end_s=14.0, ms=4000, came_s=[9.5, 9.9])
    assert numbers(phases_of([*regular(1, 10), long, *regular(16, 18)]).during) == [11]


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        (regular(10, 20), "1 epochs before the rescale, 3 during it and 7 after"),
        ([*regular(1, 10), *regular(15, 20)], "10 epochs before the rescale, 0 during it and 6 after"),
        (regular(1, 13), "10 epochs before the rescale, 3 during it and 0 after"),
    ],
)
def test_too_few_epochs_are_an_error_and_no_figure(epochs: list[Epoch], said: str) -> None:
    with pytest.raises(BenchmarkError, match=f"{said}.*Give more --seconds"):
        phases_of(epochs)


def test_outputs_at_their_usual_times_leave_no_gap() -> None:
    epochs = regular(1, 20)
    assert output_gap_ms(epochs, phases_of(epochs), MOVE) == 0.0


def test_the_gap_is_the_longest_time_without_output_that_touches_the_rescale_less_the_usual_one() -> None:
    # Outputs at 10 s and 13.5 s around it; the longer pauses from 2 s to 8 s and after 20 s have nothing to do with it.
    epochs = [*regular(1, 2), *regular(8, 10), epoch(11, end_s=13.5), *regular(14, 20), epoch(30, end_s=30.0)]
    assert output_gap_ms(epochs, phases_of(epochs), MOVE) == pytest.approx(2500.0)
    assert output_gap_ms(epochs[::-1], phases_of(epochs), MOVE) == pytest.approx(2500.0), "in any order"


def test_a_pause_that_begins_before_the_end_counts_whole() -> None:
    epochs = [*regular(1, 12), epoch(13, end_s=17.0, came_s=[12.0]), *regular(19, 22)]
    assert output_gap_ms(epochs, phases_of(epochs), MOVE) == pytest.approx(4000.0)


def test_no_output_after_the_call_is_an_error() -> None:
    epochs = regular(1, 20)
    with pytest.raises(BenchmarkError, match="No output came after the rescale"):
        output_gap_ms(epochs[:10], phases_of(epochs), MOVE)


def test_caught_up_is_the_first_output_after_the_end_with_rows_no_later_than_before() -> None:
    # Usually the oldest row is 1.2 s late. Epoch 12 is in time, but not yet after the end.
    late = [epoch(n, end_s=float(n), came_s=[n - 3.0]) for n in (11, 13, 14)]
    epochs = [*regular(1, 10), late[0], epoch(12, end_s=12.0), *late[1:], *regular(15, 20)]
    assert caught_up_ms(phases_of(epochs), MOVE) == pytest.approx((15.0 - MOVE.call_s) * 1000)


def test_a_query_that_stays_behind_is_not_caught_up() -> None:
    epochs = [*regular(1, 10), *(epoch(n, end_s=float(n), came_s=[n - 1.5]) for n in range(11, 20))]
    assert caught_up_ms(phases_of(epochs), MOVE) is None


def test_a_rescale_is_described_by_its_slowest_epoch_its_gap_and_how_late_rows_were() -> None:
    before = [
        epoch(n, end_s=float(n), ms=ms) for n, ms in ((6, 900.0), (7, 100.0), (8, 200.0), (9, 200.0), (10, 300.0))
    ]
    slow = epoch(11, end_s=13.0, ms=500.0, came_s=[9.0, 11.0, 12.0])
    after = [epoch(n, end_s=float(n), ms=ms) for n, ms in ((15, 150.0), (16, 250.0), (17, 350.0))]
    epochs = [*before, slow, *after]
    found = describe(epochs, MOVE, phases_of(epochs))
    assert found.pop("latency_ms")["during"] == {"p50": 2000.0, "p95": 4000.0, "max": 4000.0}
    assert found.pop("epochs_ms") == {
        "before": [900.0, 100.0, 200.0, 200.0, 300.0],
        "during": [500.0],
        "after": [150.0, 250.0, 350.0],
    }
    assert (found.pop("work"), found.pop("facts")) == ("2 to 4", {"rowsFetched": 7})
    assert found == pytest.approx(
        {
            "epoch_before_ms": 200.0,
            "epoch_slowest_ms": 500.0,
            "epoch_after_ms": 250.0,
            "slowest_over_before": 2.5,
            "output_gap_ms": 2000.0,
            "done_ms": 2500.0,
            "caught_up_ms": 4750.0,
        }
    )
