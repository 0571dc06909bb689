"""Whatever fails, and whenever: state and sink are those of an undisturbed run, key by key and epoch by epoch.

A history is a simulated job from its first driver to its end. Coordinator, cluster, epoch runner, workers' jobs,
holdings, migrations and the code of the checkpoint are those of production; simulated are threads, clocks, the network,
the storage, Spark, and (but for the family "real") the tables in which workers keep rows. A history follows from its
seed. At its end, sink, checkpoint, savepoints and the workers' own state are compared with a model that knows nothing
but Spark's log of offsets; a job that starts from a savepoint has to come to the same end.

ANABRANCH_SIMULATION_SEED=<family>:<seed> runs that one history; ANABRANCH_SIMULATION_SCALE=<factor> runs so many times
as many of each family. Here are the families about epochs; ``test_histories_of_changes`` has those about key groups
that move, so that two processes share the work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from simulated.application import Application
from simulated.families import undisturbed
from simulated.faults import Rescale
from simulated.history import draw_history
from simulated.runs import EPOCHS, ONLY, SCALE, quick_histories, run_family

#: What has to happen in the histories, so that it is no accident that nothing goes wrong there.
CORNERS = (
    "AbortOn",
    "DiscardAttempt",
    "DropLayersAfter",
    "FailEpoch fenced",
    "FailEpoch manifest",
    "FailEpoch refused",
    "FailEpoch sink",
    "FinishEpoch with a lost worker",
    "FoldUpTo",
    "Refuse fenced",
    "Refuse wrong_epoch",
    "Refuse wrong_step",
    "ResetState",
    "RunMissing",
    "JumpClock",
    "PauseDriver",
    "SecondDriver",
    "a driver is fenced",
    "a snapshot is made",
    "a task reads by an old route",
    "a worker flushes",
    "a worker that was here before comes back",
    "an epoch is repeated from its offsets",
    "an epoch without rows",
    "clean-up while files are in use",
    "commits_to_break",
    "deleted by a clean-up",
    "epochs_to_repeat",
    "jobs_to_fail",
    "loss noticed by the watch",
    "rolled back to run an epoch again",
    "sinks_to_fail",
    "spark_commits_to_lose",
    "starts_to_fail",
    "storage does not answer after it could list",
    "storage refuses to create",
    "storage refuses to list",
    "storage refuses to write",
    "tasks_to_break",
    "tasks_to_repeat",
    "tasks_to_skip",
    "the sink has the epoch already",
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
@pytest.mark.parametrize("family", EPOCHS)
def test_state_and_sink_equal_those_of_an_undisturbed_run(family: str, seen: Counter[str]) -> None:
    seen += run_family(family)
    assert seen["FinishEpoch"] > 0 or ONLY is not None


@pytest.mark.skipif(ONLY is not None or SCALE < 0.3, reason="few histories do not reach everything")
def test_histories_reach_every_corner_of_an_epoch(seen: Counter[str]) -> None:
    if not seen:
        pytest.skip("the histories have not run")
    assert [corner for corner in CORNERS if not seen[corner]] == []


def test_the_same_seed_gives_the_same_history() -> None:
    for seed in range(15):
        first, second = (Application(draw_history(seed)) for _ in range(2))
        outcomes = []
        for application in (first, second):
            try:
                application.run()
            except Exception as error:
                outcomes.append(str(error))
        assert len(outcomes) in (0, 2)
        worlds = [(each.world.steps, each.world.now, each.world.seen) for each in (first, second)]
        assert worlds[0] == worlds[1]


def test_an_undisturbed_job_neither_fails_nor_refuses_nor_repeats_anything() -> None:
    trouble = ("Abort", "Drop", "Fail", "Refuse", "RunMissing", "rolled", "a change", "a query fails", "the sink has")
    for seed in range(30):
        world = Application(replace(undisturbed(draw_history(seed)), embedded=False)).run()
        assert [name for name in world.seen if name.startswith(trouble)] == []
        assert world.seen["groups adopted"] > 0


def test_an_undisturbed_rescale_brings_everything_from_the_former_owners_and_lets_them_go() -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        quiet = undisturbed(draw_history(seed))
        wish = Rescale(0.06, workers=(1, 3, None)[seed % 3])
        shape = replace(quiet, rows=21, rows_per_s=40.0, workers=2, embedded=False, checkpoint_interval_s=0.0)
        # Every piece takes a moment, but none as long as anybody would wait for it.
        seen += Application(replace(shape, piece_s=0.01, worker_timeout_s=0.5, faults=(wish,))).run().seen
    trouble = ("Abort", "Drop", "Fail", "Refuse", "RunMissing", "WorkerError on fetch", "rolled", "fell back")
    assert [name for name in seen if name.startswith(trouble)] == []
    assert min(seen["kept groups are released"], seen["drained from a frozen copy"], seen["groups frozen"]) > 10
