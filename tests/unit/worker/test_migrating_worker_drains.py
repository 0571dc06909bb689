"""What workers bring in the background, how they are paced, what they report, and what they let go of afterwards."""

import time
from collections.abc import Collection, Mapping

import pyarrow as pa
import pytest

from anabranch.core import requests
from anabranch.core.answers import TransferProgress
from anabranch.core.errors import WorkerError
from anabranch.core.schemas import GROUP
from anabranch.wire import messages
from anabranch.worker.stores.memory import MemoryStore
from support.keyed_state import KEY_GROUPS, KEYS, KEYS_OF_GROUP, SPEC, STAGE, Entries, entries, group_of, keys_table
from support.state_workers import Driver, MakeDriver, owned_by, wait_until

EVEN, ODD = frozenset(range(0, KEY_GROUPS, 2)), frozenset(range(1, KEY_GROUPS, 2))


def count_rows(model: Mapping[str, Entries]) -> int:
    return sum(1 + len(each["items"]) + len(each["seen"]) for each in model.values())


def rows_in(driver: Driver, groups: Collection[int]) -> int:
    return count_rows({key: value for key, value in driver.model.items() if group_of(key) in groups})


def test_the_old_owner_deletes_what_has_arrived_elsewhere(make: MakeDriver, store: str) -> None:
    driver = make("a", "b", store=store)
    as_of = driver.epoch
    driver.give(owned_by("b", EVEN))
    driver.run_epoch({})
    driver.wait_until_all_has_arrived()
    stays, goes = rows_in(driver, ODD), rows_in(driver, EVEN)
    assert driver.progress("a").frozen_groups == len(EVEN)
    states = driver.workers["a"].local.ownership._states.values()
    wait_until(lambda: sum(state.rows() for state in states) == stays + goes)  # as soon as the last epoch is merged
    assert driver.rows("a") == stays
    driver.release()
    wait_until(lambda: sum(state.rows() for state in states) == stays)
    assert driver.rows("a") == stays
    assert driver.rows("b") == goes
    assert driver.progress("a").frozen_groups == 0
    with pytest.raises(WorkerError, match="is not here"):
        driver.fetch_keys("a", KEYS_OF_GROUP[0], as_of=as_of)
    assert driver.scan_all() == driver.model


def test_what_could_not_be_deleted_does_not_come_back_with_its_key_groups(
    make: MakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make("a", "b")
    driver.give(owned_by("b", EVEN))
    driver.run_epoch({})
    driver.wait_until_all_has_arrived()
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "drop_groups", _fail)
        driver.release()
        wait_until(lambda: "still take memory here" in caplog.text)
    driver.run_epoch({key: None for group in EVEN for key in KEYS_OF_GROUP[group][:1]})
    driver.give("a")
    driver.run_epoch({})
    driver.begin()
    assert driver.read(KEYS) == driver.model


def _fail(*_: object) -> None:
    raise OSError("cannot be deleted")


def test_a_release_of_an_earlier_assignment_means_nothing(make: MakeDriver) -> None:
    driver = make("a", "b", "c")
    driver.give(owned_by("b", EVEN))
    stale = requests.Release(**driver.job, number=driver.number)
    driver.give(owned_by("c", ODD))
    for worker in driver.workers.values():
        worker.ask(stale)
    driver.begin()
    assert driver.read(KEYS) == driver.model
    assert driver.progress("a").frozen_groups == KEY_GROUPS
    assert driver.workers["a"].local.asked["fetch_keys"] > 0


def test_what_is_on_its_way_and_what_came_is_reported(two: Driver) -> None:
    two.give(owned_by("b", EVEN))
    keys = [KEYS_OF_GROUP[group][1] for group in EVEN]
    two.begin()
    assert two.progress("b") == TransferProgress(
        assignment=two.number,
        pending_groups=len(EVEN),
        frozen_groups=0,
        fetched_rows=0,
        fetched_bytes=0,
        drained_rows=0,
        drained_bytes=0,
    )
    two.read(keys)
    fetched = two.progress("b")
    rows = count_rows(two.expected(keys))
    assert fetched.fetched_rows == rows == two.rows("b")
    assert fetched.fetched_bytes > 8 * rows
    assert (fetched.pending_groups, fetched.drained_rows) == (len(EVEN), 0)
    two.finish()
    two.wait_until_all_has_arrived()
    arrived = two.progress("b")
    assert arrived.drained_rows + rows == two.rows("b")
    assert two.rows("b") == rows_in(two, EVEN)
    assert two.progress("a").pending_groups == 0


def test_without_a_drain_only_keys_that_are_asked_for_move(two: Driver) -> None:
    two.drain = False
    asked = [KEYS_OF_GROUP[group][1] for group in EVEN]
    fetched = count_rows(two.expected(asked))
    two.give(owned_by("b", EVEN))
    two.run_epoch(dict.fromkeys(asked, entries(5)), drain_rows=-1)
    two.run_epoch({}, drain_rows=-1)
    time.sleep(0.2)
    found = two.progress("b")
    assert (found.fetched_rows, found.drained_rows, found.pending_groups) == (fetched, 0, len(EVEN))
    assert (two.workers["a"].local.asked["fetch_groups"], two.progress("a").frozen_groups) == (0, len(EVEN))
    assert two.rows("b") == count_rows(two.expected(asked))
    two.begin()
    assert two.read(KEYS) == two.model
    two.finish()
    # What no worker keeps comes from files, all of it: else a lost worker's state would never be whole again.
    two.give(owned_by("b", ODD), freeze=False)
    wait_until(lambda: two.progress("b").pending_groups == len(EVEN))
    assert two.progress("b").drained_rows > 0
    assert two.scan_all() == two.model


def test_a_drain_keeps_to_its_rows_during_an_epoch_and_goes_on_after_it(two: Driver) -> None:
    many = [f"many-{n}" for n in range(3000)]
    two.run_epoch({key: {"total": 1, "items": [], "seen": {}} for key in many})
    two.give("b")
    two.begin(drain_rows=600)
    drained = lambda: two.progress("b").drained_rows  # noqa: E731
    wait_until(lambda: drained() >= 600)
    brought = drained()
    time.sleep(0.3)
    assert drained() == brought
    # What the last step brings is not known before: eight key groups of sixteen at most.
    assert brought <= 600 + 0.6 * len(many)
    assert two.progress("b").pending_groups > 0
    two.finish()
    two.wait_until_all_has_arrived()
    assert two.scan_all() == two.model


def test_a_drain_makes_room_for_what_is_to_come(two: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[int] = []
    make_room = MemoryStore.make_room
    monkeypatch.setattr(MemoryStore, "make_room", lambda store, n: (announced.append(n), make_room(store, n)))
    many = [f"many-{n}" for n in range(3000)]
    two.run_epoch({key: {"total": 1, "items": [], "seen": {}} for key in many})
    two.give("b")
    two.progress("b")
    two.wait_until_all_has_arrived()
    # Once, after the first eight of sixteen key groups.
    (rows,) = [each for each in announced if each > 4 * len(KEYS)]  # lists and maps have more entries than keys
    assert 0.8 * len(many) / 2 < rows < 1.4 * len(many) / 2
    assert two.scan_all() == two.model


def test_a_drain_rests_during_an_epoch_that_allows_no_rows(two: Driver) -> None:
    two.give("b")
    two.begin(drain_rows=0)
    two.progress("b")
    time.sleep(0.2)
    assert two.workers["a"].local.asked["fetch_groups"] == 0
    two.workers["b"].ask(requests.Abort(**two.numbers))
    two.wait_until_all_has_arrived("b")


def test_the_rows_of_a_hot_key_are_load(two: Driver) -> None:
    group = 3
    two.begin()
    read = requests.Read(**two.numbers, stage=STAGE, groups=())
    keys = keys_table(KEYS_OF_GROUP[group][:1])

    def ask(of: int) -> None:
        rows = pa.table({GROUP: [of], "rows": [999_999]})
        two.workers["a"].client.exchange(read, {messages.KEYS: keys, messages.FURTHER_ROWS: rows})

    usual = dict(two.describe("a").load)
    ask(group)
    load = dict(two.describe("a").load)
    assert load.pop(group) == pytest.approx(usual.pop(group) + 999_999 + len(SPEC.layouts))
    assert load == usual
    for of in (-1, KEY_GROUPS):
        with pytest.raises(WorkerError, match=f"they go from 0 to {KEY_GROUPS - 1}"):
            ask(of)


def test_groups_that_are_asked_for_most_are_drained_first(two: Driver) -> None:
    two.give("b")
    hot = range(KEY_GROUPS - 4, KEY_GROUPS)
    two.begin()
    for _ in range(3):
        two.read([key for group in hot for key in KEYS_OF_GROUP[group]])
    two.write({})
    with two.without_drain_from("a") as source:
        two.commit()
        wait_until(lambda: source.asked["fetch_groups"] == 1)
        assert set(hot) <= set(source.fetched_groups)
        assert len(source.fetched_groups) < KEY_GROUPS
    two.wait_until_all_has_arrived()


def test_keys_that_epochs_change_again_and_again_are_brought_first(two: Driver) -> None:
    """Prefetched: the next epoch finds them here, and asks their former owner for none of them."""
    again = KEYS[::3]
    for _ in range(4):
        two.run_epoch({key: entries(two.epoch) for key in again})
    two.give("b")
    source = two.workers["a"].local
    with two.without_drain_from("a"):
        two.begin(drain_rows=-1)
        wait_until(lambda: source.asked["recent"] > 0 and source.asked["fetch_groups"] > 0)
        source.fetched_keys.clear()
        assert two.read(again) == {key: two.model[key] for key in again}
        assert source.fetched_keys == []


def test_keys_that_no_epoch_changes_twice_are_not_brought_first(two: Driver) -> None:
    for part in range(4):
        last = [key for group in range(part, KEY_GROUPS, 4) for key in KEYS_OF_GROUP[group]]
        two.run_epoch({key: entries(two.epoch) for key in last})
    two.give("b")
    source = two.workers["a"].local
    with two.without_drain_from("a"):
        two.begin(drain_rows=-1)
        wait_until(lambda: source.asked["recent"] > 0 and source.asked["fetch_groups"] > 0)
        assert two.read(last) == {key: two.model[key] for key in last}
        assert set(source.fetched_keys) == set(last)
