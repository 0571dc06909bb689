"""Whoever comes, goes or dies while key groups move: state and sink are those of an undisturbed run.

``test_histories`` says what a history is, and how to run one of them alone or more of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from simulated.runs import CHANGES, ONLY, SCALE, quick_histories, run_family

#: What has to happen in the histories, so that it is no accident that nothing goes wrong there.
CORNERS = (
    "CrashDeparting",
    "FinishEpoch with a lost worker",
    "Leave",
    "RestartRedis",
    "a call of Redis is half",
    "a call of Redis is killed",
    "a call of Redis is refused",
    "a call of Redis is silent",
    "a chain of two sources",
    "a change between epochs",
    "a departing worker is lost",
    "a drain from a frozen copy breaks",
    "a group returns to where it is kept",
    "a group returns unchanged to where it is kept",
    "a job starts from a savepoint",
    "a release comes after a newer assignment",
    "a rewind",
    "a rewind breaks off",
    "a task reads by an old route",
    "an older assignment is refused",
    "assigned while groups are pending",
    "assigned while groups come from peers",
    "clean-up while files are in use",
    "complete before the next epoch",
    "drained from a frozen copy",
    "due keys fetched from a frozen copy",
    "fell back to the checkpoint",
    "fetched from a frozen copy",
    "groups dropped",
    "groups frozen",
    "kept groups are dropped for a new driver",
    "kept groups are released",
    "late to a worker that was silent",
    "peers_to_break",
    "prefetched from a frozen copy",
    "storage refuses to read",
    "take_overs_to_set_back",
    "upkeep_to_kill",
)


@pytest.fixture(scope="module", autouse=True)
def _quick_histories() -> Iterator[None]:
    with quick_histories():
        yield


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What happened in all histories that have run."""
    return Counter()


# On a busy machine a family may take several times as long as on a quiet one.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", CHANGES)
def test_state_and_sink_equal_those_of_a_run_without_changes(family: str, seen: Counter[str]) -> None:
    seen += run_family(family)
    assert seen["FinishEpoch"] > 0 or ONLY is not None


@pytest.mark.skipif(ONLY is not None or SCALE < 0.3, reason="few histories do not reach everything")
def test_histories_reach_every_corner_of_a_change(seen: Counter[str]) -> None:
    if not seen:
        pytest.skip("the histories have not run")
    assert [corner for corner in CORNERS if not seen[corner]] == []
