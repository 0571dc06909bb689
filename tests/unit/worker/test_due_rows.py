"""Rows that are due, asked of real workers, also while their key groups are on their way to another owner."""

from typing import Any

import pytest

from anabranch.core import requests
from anabranch.core.requests import Expiry
from anabranch.wire import messages
from anabranch.wire.messages import DUE, EXPIRED
from support.keyed_state import KEY_GROUPS, KEYS, SPEC, STAGE, Entries, entries, from_answers, group_of, keys_table
from support.state_workers import Driver, MakeDriver, fell_back, owned_by

EVEN = frozenset(range(0, KEY_GROUPS, 2))
LATER = 1_000_000


def asked(driver: Driver, up_to: int, *, whole: bool = True, variable: str = "total", column: str = "n") -> set[Any]:
    """The keys that the owners say are due, each with its number."""
    found = []
    expiry = Expiry(variable, column, "", up_to, whole)
    for worker in driver.owning:
        groups = driver.groups_of(worker.name)
        request = requests.Read(**driver.numbers, stage=STAGE, groups=tuple(groups), expired=(expiry,))
        tables = worker.client.exchange(request, {messages.KEYS: keys_table([])})
        found += [(row["k"], row[column]) for row in tables[EXPIRED + variable].to_pylist()]
    assert len(set(found)) == len(found) or variable == "seen"
    return set(found)


def expected(driver: Driver, up_to: int) -> set[tuple[str, int]]:
    return {(key, entry["total"]) for key, entry in driver.model.items() if entry["total"] <= up_to}


def spread() -> dict[str, Entries | None]:
    """Of every key a total: its own number for a tenth of them, later for the others."""
    return {key: entries(n if n % 10 == 0 else LATER + n) for n, key in enumerate(KEYS)}


def test_what_is_due_is_found_epoch_after_epoch(make: MakeDriver, store: str) -> None:
    driver = make("a", "b", store=store)
    driver.give(owned_by("b", EVEN), freeze=False)
    for epoch in range(8):
        driver.begin()
        up_to = epoch * 5
        due = asked(driver, up_to)
        assert due == expected(driver, up_to)
        changes: dict[str, Entries | None] = dict.fromkeys(sorted(key for key, _ in due)[::2])
        changes |= {key: entries(epoch * 7) for key in KEYS[epoch::9]}
        driver.read(list(changes))
        driver.write(changes)
        driver.commit()


def due_with_entries(
    driver: Driver, keys: list[str], up_to: int
) -> tuple[dict[str, Entries], dict[str, Entries], list[str]]:
    """The entries of these keys; those of others of which something is due; and the names of these, as they came."""
    expiry = Expiry("seen", "times", "", up_to)
    found, due, others = {}, {}, []
    for worker in driver.owning:
        mine = [key for key in keys if driver.owners[group_of(key)] == worker.name]
        groups = driver.groups_of(worker.name)
        request = requests.Read(**driver.numbers, stage=STAGE, groups=tuple(groups), due=expiry)
        tables = worker.client.exchange(request, {messages.KEYS: keys_table(mine)})
        came = tables[DUE].column("k").to_pylist()
        assert tables[DUE].schema == keys_table([]).schema
        others += came
        found |= from_answers(mine, {name: tables[name] for name in SPEC.layouts})
        due |= from_answers(came, {name: tables[DUE + name] for name in SPEC.layouts})
    return found, due, others


def test_other_keys_of_which_something_is_due_come_with_all_their_entries(make: MakeDriver, store: str) -> None:
    """Each once, however many of its rows are due, and keys of one hash are told apart."""
    driver = make("a", "b", store=store)
    driver.run_epoch({key: entries(n) for n, key in enumerate(KEYS)})
    with driver.without_drain_from("a"):
        driver.give(owned_by("b", EVEN))
        for asked_for in ([], KEYS[::3], KEYS):
            driver.begin()
            found, due, others = due_with_entries(driver, asked_for, 20)
            assert found == driver.expected(asked_for)
            assert sorted(others) == sorted(set(KEYS[:21]) - set(asked_for))
            assert due == driver.expected(others)


def test_an_epoch_that_is_run_again_finds_the_same(make: MakeDriver) -> None:
    driver = make("a")
    driver.begin()
    before = asked(driver, 20)
    driver.write(dict.fromkeys(sorted(key for key, _ in before)))
    driver.begin()
    assert asked(driver, 20) == before == expected(driver, 20)


def test_rows_that_are_due_come_from_the_former_owner_without_their_key_groups(
    make: MakeDriver, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make("a", "b", store=store)
    driver.run_epoch(spread())
    with driver.without_drain_from("a") as former:
        driver.give(owned_by("b", EVEN))
        driver.begin()
        assert asked(driver, LATER - 1) == expected(driver, LATER - 1)
        assert driver.progress("b").pending_groups == len(EVEN)
        assert former.asked["fetch_due"] == 1
        few = [key for key in driver.model if driver.model[key]["total"] < LATER and group_of(key) in EVEN]
        # Of the one variable that was asked for, all rows of these keys and no others.
        assert driver.progress("b").fetched_rows == len(few)
        # Nothing is asked for twice, and only what is due since.
        assert asked(driver, LATER - 1) == expected(driver, LATER - 1)
        assert former.asked["fetch_due"] == 1
        assert asked(driver, LATER + 2) == expected(driver, LATER + 2)
        assert former.asked["fetch_due"] == 2
        assert former.asked["fetch_groups"] <= 1  # the drain, which is held up
        driver.write(dict.fromkeys(few))
        driver.commit()
        driver.begin()
        assert asked(driver, LATER + 2) == expected(driver, LATER + 2)
        driver.finish()
    driver.wait_until_all_has_arrived()
    driver.begin()
    assert asked(driver, 2 * LATER) == expected(driver, 2 * LATER)
    assert driver.scan_all() == driver.model
    assert not fell_back(caplog)


def test_what_need_not_be_found_now_is_not_brought(make: MakeDriver) -> None:
    driver = make("a", "b")
    driver.run_epoch(spread())
    with driver.without_drain_from("a") as former:
        driver.give(owned_by("b", EVEN))
        driver.begin()
        here = {(key, total) for key, total in expected(driver, LATER) if group_of(key) not in EVEN}
        assert asked(driver, LATER, whole=False) == here
        assert not former.asked["fetch_due"]


def test_rows_that_are_due_are_found_in_the_checkpoint_when_the_former_owner_is_gone(
    make: MakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make("a", "b")
    driver.run_epoch(spread())
    driver.give(owned_by("b", range(KEY_GROUPS)), to=["b"])
    driver.workers["a"].local.close()
    del driver.workers["a"]
    driver.begin()
    assert asked(driver, LATER - 1) == expected(driver, LATER - 1)
    assert fell_back(caplog)
    driver.finish()
    driver.wait_until_all_has_arrived()
    driver.begin()
    assert asked(driver, 2 * LATER) == expected(driver, 2 * LATER)


def test_rows_that_are_due_pass_through_a_worker_that_still_waits_for_them(make: MakeDriver) -> None:
    driver = make("a", "b", "c")
    driver.run_epoch(spread())
    with driver.without_drain_from("a") as former:
        driver.give(owned_by("b", EVEN))
        driver.run_epoch({KEYS[0]: entries(3)})
        with driver.without_drain_from("b"):
            driver.give(owned_by("c", EVEN))
            driver.begin()
            assert asked(driver, LATER - 1) == expected(driver, LATER - 1)
            assert former.asked["fetch_due"] == 1
            assert driver.progress("c").pending_groups == len(EVEN)


def test_a_time_may_be_in_the_entries_of_a_map(make: MakeDriver) -> None:
    driver = make("a", "b")
    driver.run_epoch(spread())
    with driver.without_drain_from("a"):
        driver.give(owned_by("b", EVEN))
        driver.begin()
        found = asked(driver, LATER - 1, variable="seen", column="times")
        assert found == expected(driver, LATER - 1)
