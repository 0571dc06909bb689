"""What goes wrong while key groups change owners: workers that die, drivers that are replaced, requests that cross."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.control.membership.launcher import EmbeddedWorkers
from anabranch.core import requests
from anabranch.core.errors import AnabranchError, CheckpointError
from anabranch.wire import messages
from anabranch.wire.client import WorkerClient
from anabranch.wire.credentials import Credentials
from support.keyed_state import KEY_GROUPS, KEYS, entries, group_of, keys_table
from support.state_workers import CREDENTIALS, JOB, Driver, MakeDriver, Worker, changed, fell_back, owned_by, wait_until

EVEN, ODD = frozenset(range(0, KEY_GROUPS, 2)), frozenset(range(1, KEY_GROUPS, 2))


# ---------------------------------------------------------------------------------------- workers that die


@pytest.mark.parametrize("store", ["memory", "rocksdb"])
def test_when_the_former_owner_dies_in_the_middle_the_checkpoint_takes_its_place(
    make: MakeDriver, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make("a", "b", store=store)
    driver.give("b")
    some = KEYS[::3]
    with driver.without_drain_from("a"):
        driver.run_epoch(changed(driver, some))
    driver.begin()
    assert driver.read(KEYS[:9]) == driver.expected(KEYS[:9])
    driver.workers.pop("a").local.close()
    assert driver.read(KEYS) == driver.model
    driver.write(changed(driver, KEYS[1::3]))
    driver.commit()
    driver.wait_until_all_has_arrived()
    assert driver.scan_all() == driver.model
    assert fell_back(caplog)


def test_when_the_former_owner_dies_before_anything_was_fetched_nothing_is_missing(two: Driver) -> None:
    two.give("b")
    two.workers.pop("a").local.close()
    two.begin()
    two.write(changed(two, KEYS[::2]))
    two.commit()
    two.wait_until_all_has_arrived()
    assert two.scan_all() == two.model


def test_when_the_worker_in_the_middle_of_two_rescales_dies_its_writes_are_in_the_checkpoint(make: MakeDriver) -> None:
    driver = make("a", "b", "c")
    driver.give(owned_by("b", EVEN))
    with driver.without_drain_from("a"):
        driver.run_epoch(changed(driver, KEYS[::2]))
        driver.give(owned_by("c", EVEN))
    driver.workers.pop("b").local.close()
    driver.begin()
    assert driver.read(KEYS) == driver.model
    driver.finish()
    driver.wait_until_all_has_arrived()
    assert driver.scan_all() == driver.model


def test_when_the_first_of_a_chain_dies_the_middle_one_goes_on_from_the_checkpoint(make: MakeDriver) -> None:
    driver = make("a", "b", "c")
    driver.give("b")
    with driver.without_drain_from("a"):
        driver.run_epoch(changed(driver, KEYS[::2]))
        driver.give("c")
    driver.workers.pop("a").local.close()
    driver.begin()
    assert driver.read(KEYS) == driver.model
    driver.finish()
    driver.wait_until_all_has_arrived("c")
    assert driver.scan_all() == driver.model


def test_an_assignment_points_what_is_under_way_to_the_files_of_now(two: Driver) -> None:
    """Those of before may be cleaned up from then on."""
    with two.without_drain_from("a"):
        two.give("b")
        two.run_epoch(changed(two, KEYS[::3]))
        kept = [replace(file, path=file.path.replace(".parquet", "-kept.parquet")) for file in two.files]
        for old, new in zip(two.files, kept, strict=True):
            (Path(two.checkpoint) / old.path).rename(Path(two.checkpoint) / new.path)
        two.files = kept
        two.give({})
    two.workers.pop("a").local.close()
    two.begin()
    assert two.read(KEYS) == two.model
    two.finish()
    two.wait_until_all_has_arrived()
    assert two.scan_all() == two.model


def test_a_process_that_is_killed_while_it_hands_over_loses_nothing(make: MakeDriver, tmp_path: Path) -> None:
    processes = EmbeddedWorkers(store="memory", state_path=str(tmp_path), credentials=CREDENTIALS, start_timeout_s=60)
    try:
        (started,) = processes.start(1)
        driver = make("b")
        driver.add(Worker("p", started.address, WorkerClient(started.address, timeout_s=60, credentials=CREDENTIALS)))
        driver.give("p")
        driver.run_epoch(changed(driver, KEYS), drain_rows=-1)
        driver.wait_until_all_has_arrived("p")
        driver.give("b")
        driver.begin()
        assert driver.read(KEYS[::4]) == driver.expected(KEYS[::4])
        processes.kill(started.worker)
        driver.workers.pop("p")
        assert driver.read(KEYS) == driver.model
        driver.write(changed(driver, KEYS[::2]))
        driver.commit()
        driver.wait_until_all_has_arrived("b")
        assert driver.scan_all() == driver.model
    finally:
        processes.stop()


def test_errors_of_both_sources_reach_the_task_and_are_not_swallowed(two: Driver) -> None:
    """Else a key whose state cannot be read would look like one that does not exist."""
    two.give("b")
    two.begin()
    for file in Path(two.checkpoint).rglob("*.parquet"):
        file.unlink()
    two.workers.pop("a").local.close()
    with pytest.raises(CheckpointError):
        two.read(KEYS)
    with pytest.raises(CheckpointError):
        two.write(changed(two, KEYS))
    with pytest.raises(CheckpointError):
        two.scan("b")
    assert two.progress("b").pending_groups == KEY_GROUPS


# ----------------------------------------------------------------------------------- epochs and drivers


def test_an_epoch_that_is_run_again_during_a_migration_starts_from_the_same_state(two: Driver) -> None:
    two.give(owned_by("b", EVEN))
    two.begin()
    two.read(KEYS[::2])
    two.write({key: entries(5000) for key in KEYS})
    for worker in two.owning:
        worker.ask(requests.Abort(**two.numbers))
    two.begin()
    assert two.read(KEYS) == two.model
    two.write(changed(two, KEYS))
    two.commit()
    two.wait_until_all_has_arrived()
    assert two.scan_all() == two.model


def test_a_new_driver_that_finds_a_migration_under_way_completes_it_from_the_checkpoint(two: Driver) -> None:
    two.give(owned_by("b", EVEN))
    with two.without_drain_from("a"):
        two.run_epoch(changed(two, KEYS[::2]))
        two.generation += 1
        two.run = -1
        two.give({}, freeze=False)
        assert two.workers["a"].local.ownership.frozen == {}
    two.begin()
    assert two.read(KEYS) == two.model
    two.write(changed(two, KEYS[::3]))
    two.commit()
    two.wait_until_all_has_arrived()
    assert two.scan_all() == two.model


# -------------------------------------------------------------------------------------- requests that cross


@pytest.mark.parametrize("by", ["fetch", "drain"])
def test_groups_that_are_dropped_while_they_are_handed_out_are_not_taken_for_empty(two: Driver, by: str) -> None:
    """A new driver lets the old owner forget them, just when it has looked that they are there and begins to read."""
    two.give(owned_by("b", EVEN))
    ownership = two.workers["a"].local.ownership
    check, replaced = ownership.check_frozen, threading.Event()

    def check_then_forget(groups: list[int], as_of: int) -> None:
        check(groups, as_of)
        if not replaced.is_set():
            replaced.set()
            two.generation, two.run = 2, -1
            two.give({}, freeze=False)

    two.begin()
    old = two.numbers
    ownership.check_frozen = check_then_forget  # type: ignore[method-assign,assignment]
    if by == "fetch":
        keys = [key for key in KEYS if group_of(key) in EVEN]
        request = requests.Read(**old, stage=1, groups=())
        two.workers["b"].client.exchange(request, {messages.KEYS: keys_table(keys)})  # whatever it says: too late
    else:
        two.workers["b"].ask(requests.Abort(**old))
        two.progress("b")
        assert replaced.wait(10)
        two.wait_until_all_has_arrived()
    two.begin()
    assert two.read(KEYS) == two.model


def test_a_look_at_the_state_does_not_show_groups_that_are_just_being_dropped(two: Driver) -> None:
    two.give(owned_by("b", EVEN))
    two.run_epoch({})
    two.wait_until_all_has_arrived()
    dropping, dropped = threading.Event(), threading.Event()
    ownership = two.workers["a"].local.ownership
    drop = ownership._drop

    def drop_slowly(groups: frozenset[int]) -> None:
        dropping.set()
        dropped.wait(30)
        drop(groups)

    ownership._drop = drop_slowly  # type: ignore[method-assign,assignment]
    try:
        two.release()
        assert dropping.wait(10)
        assert {group_of(key) for key in two.scan("a")} <= ODD
        assert two.scan_all() == two.model
    finally:
        dropped.set()


def test_a_release_that_waits_its_turn_lets_go_only_of_what_it_is_about(make: MakeDriver) -> None:
    """It is carried out in the background, behind merges; a later assignment may come first."""
    driver = make("a", "b")
    driver.give(owned_by("b", EVEN))
    driver.run_epoch({})
    driver.wait_until_all_has_arrived()
    busy = threading.Event()
    job = driver.workers["a"].local._jobs._jobs[JOB]
    job._background._folds.submit(lambda: busy.wait(30))
    driver.release()
    as_of = driver.epoch
    driver.give(owned_by("b", ODD))
    busy.set()
    job._background._folds.submit(lambda: None).result(30)
    keys = [key for key in KEYS if group_of(key) in ODD and key in driver.model]
    assert len(driver.fetch_keys("a", keys, as_of=as_of)) == len(keys)


def test_two_tasks_that_need_the_same_keys_share_one_fetch(two: Driver) -> None:
    two.give("b")
    two.begin()
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = list(pool.map(lambda _: two.read(KEYS), range(4)))
    assert answers == [two.model] * 4
    assert two.workers["a"].local.asked["fetch_keys"] == 3  # one for each variable


def test_tasks_are_served_while_a_drain_of_the_same_groups_is_held_up(two: Driver) -> None:
    two.give("b")
    with two.without_drain_from("a") as source:
        two.begin(drain_rows=-1)
        wait_until(lambda: source.asked["fetch_groups"] > 0)
        with ThreadPoolExecutor(max_workers=1) as pool:
            reading = pool.submit(two.read, KEYS)
            wait([reading], timeout=10)
            assert reading.done()
            assert reading.result() == two.model
    two.write(changed(two, KEYS[::2]))
    two.commit()
    two.wait_until_all_has_arrived()
    assert two.scan_all() == two.model


def test_a_worker_that_does_not_answer_its_peer_is_given_up_after_its_time(
    two: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    two.peer_timeout_ms = 300
    two.give("b")
    silent = threading.Event()
    two.workers["a"].local.before["fetch_keys"] = lambda: silent.wait(30)
    try:
        two.begin()
        assert two.read(KEYS) == two.model
        assert fell_back(caplog)
    finally:
        silent.set()


def test_a_peer_with_another_token_is_refused_and_does_no_harm(two: Driver) -> None:
    stranger = WorkerClient(two.workers["a"].address, timeout_s=10, credentials=Credentials("wrong"))
    two.give("b")
    request = requests.FetchGroups(**two.job, as_of=two.epoch, stage=1, variable="total", groups=(0,))
    with pytest.raises(AnabranchError, match="token"):
        list(stranger.stream(request))
    stranger.close()
