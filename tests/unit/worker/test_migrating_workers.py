"""Real workers whose key groups change owners while epochs run: every key is, at every moment, what it should be."""

import pytest

from anabranch.core import requests
from anabranch.core.errors import EpochError, FencedError, WorkerError
from anabranch.wire import messages
from support.keyed_state import (
    KEY_GROUPS,
    KEYS,
    KEYS_OF_GROUP,
    Entries,
    entries,
    from_answers,
    group_of,
    hash_of,
    keys_table,
)
from support.state_workers import JOB, Driver, MakeDriver, changed, fell_back, owned_by

EVEN, ODD = frozenset(range(0, KEY_GROUPS, 2)), frozenset(range(1, KEY_GROUPS, 2))


def test_every_key_group_has_keys_and_some_share_a_hash() -> None:
    assert all(len(keys) == 4 for keys in KEYS_OF_GROUP.values())
    assert all(len({hash_of(key) for key in keys}) == 3 for keys in KEYS_OF_GROUP.values())
    assert any(hash_of(key) < 0 for key in KEYS)
    assert all(group_of(key) == group for group, keys in KEYS_OF_GROUP.items() for key in keys)


# ------------------------------------------------------------------------------------------------- rescales


def test_a_new_worker_serves_its_key_groups_at_once(
    make: MakeDriver, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make("a", "b", store=store)
    driver.give(owned_by("b", EVEN))
    driver.begin()
    assert driver.progress("b").pending_groups == len(EVEN)
    assert driver.read(KEYS) == driver.model
    driver.write(changed(driver, KEYS))
    driver.commit()
    driver.wait_until_all_has_arrived()
    assert driver.scan_all() == driver.model
    assert not fell_back(caplog)


def test_no_key_group_at_a_border_loses_its_state(make: MakeDriver) -> None:
    """Ranges of groups go to three workers; no group is in two of them, and none in none."""
    driver = make("a", "b", "c")
    driver.give({**owned_by("b", range(5, 11)), **owned_by("c", range(11, KEY_GROUPS))})
    driver.begin()
    for group, keys in KEYS_OF_GROUP.items():
        assert driver.read(keys) == driver.expected(keys), group
    driver.finish()
    driver.wait_until_all_has_arrived()
    found = {group_of(key) for key in driver.scan_all()}
    assert found == {group_of(key) for key in driver.model}
    assert driver.scan_all() == driver.model


def test_a_worker_of_another_name_finds_the_state_of_the_one_before(two: Driver) -> None:
    two.give("b")
    two.begin()
    assert two.read(KEYS) == two.model


def test_all_state_of_a_worker_that_leaves_is_taken_over(make: MakeDriver, store: str) -> None:
    driver = make("a", "b", store=store)
    driver.give(owned_by("b", EVEN))
    driver.run_epoch(changed(driver, KEYS))
    driver.wait_until_all_has_arrived()
    driver.release()
    driver.give(owned_by("a", EVEN))
    driver.run_epoch(changed(driver, KEYS[1::2]))
    driver.wait_until_all_has_arrived("a")
    driver.release()
    driver.workers.pop("b").local.close()
    driver.begin()
    assert driver.read(KEYS) == driver.model
    assert driver.scan_all() == driver.model


def test_a_worker_can_give_and_take_at_once(make: MakeDriver, store: str, caplog: pytest.LogCaptureFixture) -> None:
    driver = make("a", "b", store=store)
    driver.give(owned_by("b", EVEN))
    driver.wait_until_all_has_arrived()
    driver.release()
    driver.run_epoch(changed(driver, KEYS))
    driver.give({**owned_by("a", EVEN), **owned_by("b", ODD)})
    driver.run_epoch(changed(driver, KEYS))
    driver.wait_until_all_has_arrived()
    assert driver.scan_all() == driver.model
    assert not fell_back(caplog)


def test_a_second_rescale_remembers_what_the_first_has_migrated(
    make: MakeDriver, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From the first to the second worker and on to the third, before most of it has left the first."""
    driver = make("a", "b", "c", store=store)
    driver.give(owned_by("b", EVEN))
    some = [KEYS_OF_GROUP[group][0] for group in EVEN]
    with driver.without_drain_from("a"):
        driver.run_epoch(changed(driver, some))
        driver.give(owned_by("c", EVEN))
        assert driver.workers["c"].local.ownership.progress(0).pending_groups == len(EVEN)
    driver.begin()
    assert driver.read(KEYS) == driver.model
    driver.write(changed(driver, KEYS[::2]))
    driver.commit()
    driver.wait_until_all_has_arrived("c")
    assert driver.scan_all() == driver.model
    assert not fell_back(caplog)


@pytest.mark.parametrize("by", ["fetch", "drain"])
def test_a_worker_in_the_middle_asks_the_first_for_what_it_never_had(make: MakeDriver, by: str) -> None:
    driver = make("a", "b", "c")
    with driver.without_drain_from("a"):
        driver.give("b")
        driver.run_epoch(changed(driver, KEYS[::4]))
        middle = driver.workers["b"].local.ownership
        middle.begin_epoch(0)  # it drains nothing more by itself
        driver.give("c")
    if by == "fetch":
        driver.begin()
        assert driver.read(KEYS) == driver.model
    else:
        driver.wait_until_all_has_arrived("c")
        assert driver.workers["a"].local.asked["fetch_keys"] == 3  # in that one epoch
    assert driver.scan_all() == driver.model


def test_state_that_returns_before_anything_was_fetched_is_whole(two: Driver) -> None:
    two.give(owned_by("b", EVEN))
    two.give(owned_by("a", EVEN))
    two.begin()
    assert two.read(KEYS) == two.model
    two.write(changed(two, KEYS[::3]))
    two.commit()
    two.wait_until_all_has_arrived()
    assert two.scan_all() == two.model


def test_state_that_returns_is_what_its_owner_made_of_it_meanwhile(make: MakeDriver, store: str) -> None:
    driver = make("a", "b", store=store)
    driver.give(owned_by("b", EVEN))
    driver.run_epoch(changed(driver, KEYS[::2]))
    driver.give(owned_by("a", EVEN))
    driver.begin()
    assert driver.read(KEYS) == driver.model
    driver.finish()
    driver.wait_until_all_has_arrived("a")
    assert driver.scan_all() == driver.model


def test_state_that_goes_round_and_round_waits_for_nobody(make: MakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    """Three changes between two epochs: each worker waits for the one before, and none may wait for itself."""
    driver = make("a", "b", "c")
    driver.peer_timeout_ms = 3_000
    for owner in ("b", "a", "c"):
        driver.give(owned_by(owner, EVEN))
    driver.begin()
    assert driver.read(KEYS) == driver.model
    assert driver.workers["c"].local.ownership.progress(0).fetched_rows > 0
    # The worker that the state only passed through may turn to the checkpoint: its source has taken the state back.
    assert "did not answer" not in caplog.text
    driver.finish()
    driver.wait_until_all_has_arrived("c")
    assert driver.scan_all() == driver.model
    assert sum(worker.local.asked["fetch_groups"] for worker in driver.workers.values()) < 100


# -------------------------------------------------------------------------------------------- single keys


def test_a_write_to_a_key_that_was_not_read_before_counts(two: Driver) -> None:
    """A write to a key that has not been migrated must not end as the old value of its former owner."""
    with two.without_drain_from("a"):
        two.give(owned_by("b", EVEN))
        two.begin()
        two.write(changed(two, KEYS))
        two.commit()
        two.run_epoch({})  # what was written is merged into the store, where the drain brings the rest
        two.workers["b"].local._jobs._jobs[JOB]._background._folds.submit(lambda: None).result(30)
    two.wait_until_all_has_arrived()
    assert two.scan_all() == two.model
    two.run_epoch(changed(two, KEYS[::2]))


def test_one_fetched_key_does_not_hide_those_with_the_same_hash(two: Driver) -> None:
    two.run_epoch({key: entries(n) for n, key in enumerate(KEYS)})
    two.give(owned_by("b", EVEN))
    for tail in ("#1", "#2"):
        two.begin()
        keys = [key for key in KEYS if key.endswith(tail)]
        assert two.read(keys) == two.expected(keys)
        assert len(two.expected(keys)) == KEY_GROUPS
    assert two.workers["b"].local.ownership.progress(0).fetched_rows > 0


def test_maps_and_lists_keep_their_size_and_their_neighbours(two: Driver) -> None:
    """Map keys that begin alike, of keys that begin alike, are told apart; a map that was cleared stays so."""
    key = KEYS_OF_GROUP[0][2]
    sibling = KEYS_OF_GROUP[0][3]
    full: Entries = {"total": 1, "items": ["x", "y"], "seen": {"": 0, "a": 1, "aa": 2, "aaa": 3}}
    two.run_epoch({key: full, sibling: {**full, "seen": {"a": 9}}})
    two.give(owned_by("b", EVEN))
    two.run_epoch({key: {"total": 2, "items": [], "seen": {"aa": 5}}})
    two.wait_until_all_has_arrived()
    found = two.scan("b")
    assert found[key] == {"total": 2, "items": [], "seen": {"aa": 5}}
    assert found[sibling] == {**full, "seen": {"a": 9}}
    assert two.scan_all() == two.model


def test_that_a_key_does_not_exist_is_asked_once(two: Driver) -> None:
    two.give(owned_by("b", EVEN))
    strangers = [key + "-stranger" for key in KEYS]
    mine = [key for key in strangers if group_of(key) in EVEN]
    source = two.workers["a"].local
    two.begin()
    for _ in range(3):
        assert two.read(strangers) == {}
    assert source.asked["fetch_keys"] == len(two.describe("b").variables)
    assert sorted(source.fetched_keys) == sorted(mine * 3)
    two.write({mine[0]: entries(7)})
    two.commit()
    assert source.asked["fetch_keys"] == 3
    two.begin()
    assert two.read(strangers) == {mine[0]: entries(7)}


def test_known_keys_are_not_asked_for_again_in_later_epochs(two: Driver) -> None:
    two.give(owned_by("b", EVEN))
    with two.without_drain_from("a") as source:
        two.run_epoch(changed(two, KEYS[::2]))
        asked = source.asked["fetch_keys"]
        two.run_epoch(changed(two, KEYS[::2]))
        two.run_epoch(changed(two, KEYS[::4]))
        assert source.asked["fetch_keys"] == asked > 0


def test_all_rows_of_a_partition_are_there_when_a_task_asks_for_the_rest(two: Driver) -> None:
    two.give(owned_by("b", EVEN))
    two.begin()
    request = requests.Read(**two.numbers, stage=1, groups=(0, 2), rest=True)
    wanted = KEYS_OF_GROUP[0][0]
    tables = two.workers["b"].client.exchange(request, {messages.KEYS: keys_table([wanted])})
    rest = from_answers([], {name.removeprefix("rest."): t for name, t in tables.items() if name.startswith("rest.")})
    others = [key for group in (0, 2) for key in KEYS_OF_GROUP[group] if key != wanted]
    assert rest == two.expected(others)


# ----------------------------------------------------------------------------------------------- refusals


def test_a_task_with_an_old_route_is_refused(two: Driver) -> None:
    two.give(owned_by("b", EVEN))
    two.begin()
    stale, fresh = KEYS_OF_GROUP[0][0], KEYS_OF_GROUP[1][0]
    old = two.workers["a"]
    read = requests.Read(**two.numbers, stage=1, groups=())
    with pytest.raises(WorkerError, match=r"Key group 0 is not held by this worker\. The task has an old route"):
        old.client.exchange(read, {messages.KEYS: keys_table([fresh, stale])})
    with pytest.raises(WorkerError, match="old route"):
        two.write_to(old, {stale: entries(5)})
    with pytest.raises(WorkerError, match="old route"):
        old.client.exchange(
            requests.Read(**two.numbers, stage=1, groups=(0,), rest=True), {messages.KEYS: keys_table([fresh])}
        )
    two.write_to(old, {fresh: entries(5)})


def test_only_frozen_groups_of_the_right_epoch_are_handed_out(two: Driver) -> None:
    as_of = two.epoch
    two.give(owned_by("b", EVEN))
    key = KEYS_OF_GROUP[0][1]
    assert len(two.fetch_keys("a", [key], as_of=as_of)) == 1
    assert len(two.fetch_groups("a", [0, 2], as_of=as_of)) > 1
    for wrong in (as_of - 1, as_of + 1):
        with pytest.raises(
            WorkerError, match=rf"group 0 as of epoch {wrong} is not here\. Take it from the checkpoint"
        ):
            two.fetch_keys("a", [key], as_of=wrong)
        with pytest.raises(WorkerError, match="is not here"):
            two.fetch_groups("a", [0, 2], as_of=wrong)
    for groups in ([1], [0, 1]):  # the old owner's own, which change
        with pytest.raises(WorkerError, match="group 1 as of"):
            two.fetch_groups("a", groups, as_of=as_of)
    with pytest.raises(WorkerError, match="is not here"):
        two.fetch_keys("b", [key], as_of=as_of)


def test_assignments_of_other_epochs_and_overtaken_ones_are_refused(two: Driver) -> None:
    worker = two.workers["a"]
    for epoch in (two.epoch - 1, two.epoch + 1):
        with pytest.raises(EpochError, match="do not fit worker a"):
            two.assign(worker, None, epoch=epoch)
    two.give(owned_by("b", EVEN))
    with pytest.raises(EpochError, match="other key groups since"):
        two.assign(worker, None, number=two.number - 1)
    assert two.progress("a").frozen_groups == len(EVEN)


def test_a_driver_that_was_replaced_can_neither_release_nor_fetch(two: Driver) -> None:
    as_of = two.epoch
    two.give(owned_by("b", EVEN))
    two.generation += 1
    two.open(two.workers["a"])
    two.generation -= 1
    with pytest.raises(FencedError):
        two.workers["a"].ask(requests.Release(**two.job, number=two.number))
    with pytest.raises(FencedError):
        two.fetch_keys("a", KEYS_OF_GROUP[0], as_of=as_of)
    two.generation += 1
    assert two.progress("a").frozen_groups == len(EVEN)
