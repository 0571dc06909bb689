"""Whatever fails, and whenever: state and sink are those of an undisturbed run, key by key and epoch by epoch.

ANABRANCH_SIMULATION_SEED=<family>:<seed> runs that one history; ANABRANCH_SIMULATION_SCALE=<factor> runs so many times
as many of each family.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from epoch_application import Application
from epoch_history import (
    History,
    draw_broken_reads,
    draw_history,
    draw_late_pieces,
    draw_losses,
    draw_rerun,
    draw_return,
    draw_upkeep,
    undisturbed,
)

SCALE = float(os.environ.get("ANABRANCH_SIMULATION_SCALE", "1"))
ONLY = os.environ.get("ANABRANCH_SIMULATION_SEED")
#: How histories are drawn, and how many of them; 10,000 in all.
FAMILIES: dict[str, tuple[Callable[[int], History], int]] = {
    "any": (draw_history, 4800),
    "losses": (draw_losses, 1000),
    "upkeep": (draw_upkeep, 1000),
    "reads": (draw_broken_reads, 400),
    "return": (draw_return, 800),
    "rerun": (draw_rerun, 1200),
    "late": (draw_late_pieces, 800),
}


def seeds(family: str) -> range:
    if ONLY is None:
        return range(round(SCALE * FAMILIES[family][1]))
    chosen, _, seed = ONLY.rpartition(":")
    return range(int(seed), int(seed) + 1) if chosen == family else range(0)


def run_family(family: str) -> Counter[str]:
    """Runs all histories of a family; what happened in them, how often."""
    happened: Counter[str] = Counter()
    for seed in seeds(family):
        history = FAMILIES[family][0](seed)
        try:
            happened += Application(history).run().seen
        except Exception as error:
            error.add_note(f"{history}\nRun it alone with ANABRANCH_SIMULATION_SEED={family}:{seed}.")
            raise
    return happened


@pytest.fixture(scope="module", autouse=True)
def _few_collections() -> Iterator[None]:
    """Histories leave many small cycles behind; looking for them all the time takes a tenth of the time."""
    known = gc.get_threshold()
    gc.set_threshold(200_000)
    yield
    gc.set_threshold(*known)


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What happened in all histories that have run."""
    return Counter()


@pytest.mark.parametrize("family", FAMILIES)
def test_state_and_sink_equal_those_of_an_undisturbed_run(family: str, seen: Counter[str]) -> None:
    seen += run_family(family)
    assert seen["FinishEpoch"] > 0 or ONLY is not None


@pytest.mark.skipif(ONLY is not None or SCALE < 0.5, reason="few histories do not reach everything")
def test_histories_reach_every_corner_of_the_protocol(seen: Counter[str]) -> None:
    if not seen:
        pytest.skip("the histories have not run")
    corners = [
        *("AbortOn", "DiscardAttempt", "DropLayersAfter", "FoldUpTo", "ResetState", "RunMissing"),
        *("FailEpoch fenced", "FailEpoch manifest", "FailEpoch refused", "FailEpoch sink"),
        *("FinishEpoch with a lost worker", "an epoch is run again in place", "a repair starts over"),
        *("Refuse fenced", "Refuse not_sealed", "Refuse wrong_epoch", "Refuse wrong_step", "fenced task"),
        *("caught up with a lost commit", "rolled back to run an epoch again"),
        *("an older route is refused", "assignment and clean-up wait for each other", "CheckpointError"),
        *("groups adopted", "groups dropped", "assigned while groups are pending", "workers come back"),
        *("late to a worker that was silent", "loss noticed by the watch"),
        *("snapshot", "upkeep killed", "upkeep stopped by FencedError"),
        *("deleted by a clean-up", "clean-up while files are in use"),
    ]
    assert [corner for corner in corners if seen[corner] == 0] == []


def test_the_same_seed_gives_the_same_history() -> None:
    for seed in range(30):
        first, second = (Application(draw_history(seed)).run() for _ in range(2))
        assert (first.steps, first.now, first.seen) == (second.steps, second.now, second.seen)


def test_an_undisturbed_job_neither_fails_nor_refuses_nor_repeats_anything() -> None:
    for seed in range(50):
        world = Application(replace(undisturbed(draw_history(seed)), embedded=False)).run()
        trouble = ("Abort", "Drop", "Fail", "Refuse", "Reset", "RunMissing", "Unable", "rolled", "repair", "an epoch")
        assert [name for name in world.seen if name.startswith(trouble)] == []
        assert world.seen["groups adopted"] > 0


def test_a_read_that_broke_leaves_nothing_behind_when_the_rest_comes_from_elsewhere() -> None:
    for seed in (1371, 1528, 2103):
        Application(draw_broken_reads(seed)).run()
