"""Whatever fails, and whenever: state and sink are those of an undisturbed run, key by key and epoch by epoch.

ANABRANCH_SIMULATION_SEED=<family>:<seed> runs that one history; ANABRANCH_SIMULATION_SCALE=<factor> runs so many times
as many of each family.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from epoch_application import Application
from epoch_families import (
    draw_broken_reads,
    draw_chains,
    draw_late_pieces,
    draw_losses,
    draw_moves,
    draw_rerun,
    draw_return,
    draw_slow_drains,
    draw_strays,
    draw_upkeep,
    undisturbed,
)
from epoch_faults import Rescale
from epoch_history import History, draw_history

SCALE = float(os.environ.get("ANABRANCH_SIMULATION_SCALE", "1"))
ONLY = os.environ.get("ANABRANCH_SIMULATION_SEED")
#: How histories are drawn, and how many of them; 10,000 in all.
FAMILIES: dict[str, tuple[Callable[[int], History], int]] = {
    "any": (draw_history, 3600),
    "losses": (draw_losses, 600),
    "upkeep": (draw_upkeep, 600),
    "reads": (draw_broken_reads, 300),
    "return": (draw_return, 800),
    "rerun": (draw_rerun, 1000),
    "late": (draw_late_pieces, 900),
    "moves": (draw_moves, 1200),
    "slow": (draw_slow_drains, 400),
    "chains": (draw_chains, 500),
    "strays": (draw_strays, 100),
}
#: What must happen so often, so that it is no accident that nothing goes wrong there.
OFTEN = {
    "fetched from a frozen copy": 2000,
    "prefetched from a frozen copy": 1000,
    "drained from a frozen copy": 2000,
    "fell back to the checkpoint": 1000,
    "a chain of two sources": 1000,
    "a group returns to where it is kept": 300,
    "a group returns unchanged to where it is kept": 100,
    "kept groups are released": 500,
    "a release comes after a newer assignment": 40,
    "a departing worker is lost": 40,
    "kept groups are dropped for a new driver": 500,
    "a change during a migration": 1000,
    "assigned while groups come from peers": 1000,
    "complete before the next epoch": 500,
    "a drain from a frozen copy breaks": 20,
    "a task reads by an old route": 200,
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
        *("FinishEpoch with a lost worker", "an epoch is run again in place", "a change starts over"),
        *("Refuse fenced", "Refuse not_sealed", "Refuse wrong_epoch", "Refuse wrong_step", "fenced task"),
        *("caught up with a lost commit", "rolled back to run an epoch again"),
        *("an older assignment is refused", "assignment and clean-up wait for each other", "CheckpointError"),
        *("groups adopted", "groups dropped", "assigned while groups are pending", "workers come back"),
        *("late to a worker that was silent", "loss noticed by the watch"),
        *("snapshot", "upkeep killed", "upkeep stopped by FencedError"),
        *("deleted by a clean-up", "clean-up while files are in use"),
    ]
    assert [corner for corner in corners if seen[corner] == 0] == []
    assert {corner: seen[corner] for corner, often in OFTEN.items() if seen[corner] < SCALE * often} == {}


def test_the_same_seed_gives_the_same_history() -> None:
    for seed in range(30):
        first, second = (Application(draw_history(seed)).run() for _ in range(2))
        assert (first.steps, first.now, first.seen) == (second.steps, second.now, second.seen)


def test_an_undisturbed_job_neither_fails_nor_refuses_nor_repeats_anything() -> None:
    for seed in range(50):
        world = Application(replace(undisturbed(draw_history(seed)), embedded=False)).run()
        trouble = ("Abort", "Drop", "Fail", "Refuse", "Reset", "RunMissing", "Unable", "rolled", "change", "an epoch")
        assert [name for name in world.seen if name.startswith(trouble)] == []
        assert world.seen["groups adopted"] > 0


def test_an_undisturbed_rescale_brings_everything_from_the_former_owners_and_lets_them_go() -> None:
    seen: Counter[str] = Counter()
    for seed in range(50):
        quiet = undisturbed(draw_history(seed))
        wish = Rescale(90, workers=(1, 3, None)[seed % 3])
        shape = {"embedded": False, "epochs": 4, "workers": 2, "drain_ticks": 30}
        seen += Application(replace(quiet, **shape, faults=(wish,))).run().seen
    trouble = ("Abort", "Drop", "Fail", "Refuse", "RunMissing", "Unable", "WorkerError", "rolled", "fell back")
    assert [name for name in seen if name.startswith(trouble)] == []
    assert min(seen["kept groups are released"], seen["drained from a frozen copy"], seen["groups frozen"]) > 20


def test_a_read_that_broke_leaves_nothing_behind_when_the_rest_comes_from_elsewhere() -> None:
    for seed in (61, 252, 426):
        Application(draw_broken_reads(seed)).run()


@pytest.mark.parametrize(
    ("draw", "seeds"),
    [
        (draw_slow_drains, (144, 635, 699)),  # what was fetched from a former owner came after the fall-back was over
        (draw_chains, (514,)),  # a worker that was reset took what it had kept for something that does not exist
    ],
)
def test_histories_that_once_lost_state(draw: Callable[[int], History], seeds: Sequence[int]) -> None:
    for seed in seeds:
        Application(draw(seed)).run()
