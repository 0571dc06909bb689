"""A worker that is told to go waits for its driver to notice, however seldom that looks, but not if it is gone."""

import threading

from anabranch.core import requests
from support.state_workers import JOB, Driver, MakeDriver, wait_until

SELDOM_MS = 600_000
#: Long enough for a worker that does not wait to be gone.
_LOOK_S = 0.5


def leaving(driver: Driver, worker: str) -> threading.Thread:
    """The worker's way out. It gives the driver no time beyond what that has announced."""
    service = driver.workers[worker].local
    thread = threading.Thread(
        target=service.leave, kwargs={"patience_s": 0.0, "urgent": threading.Event()}, daemon=True
    )
    thread.start()
    return thread


def test_a_worker_that_is_to_go_waits_for_a_driver_that_looks_seldom(make: MakeDriver) -> None:
    driver = make("a", "b")
    driver.heartbeat_ms = SELDOM_MS
    driver.give("a", freeze=False)
    on_its_way = leaving(driver, "a")
    on_its_way.join(_LOOK_S)
    assert on_its_way.is_alive()
    assert driver.workers["a"].ask(requests.Health()).leaving
    driver.give("b")
    driver.run_epoch({}, drain_rows=-1)
    driver.wait_until_all_has_arrived("b")
    assert on_its_way.is_alive(), "it keeps what it had until the driver says that all has arrived"
    driver.release()
    wait_until(lambda: not on_its_way.is_alive())
    assert driver.scan_all() == driver.model


def test_a_worker_that_is_to_go_does_not_wait_for_a_driver_that_is_gone(make: MakeDriver) -> None:
    driver = make("a", "b")
    driver.heartbeat_ms = 1
    driver.give("a", freeze=False)
    wait_until(lambda: not leaving(driver, "a").is_alive())
    assert driver.workers["a"].local.ownership.groups, "nobody has taken them"


def test_a_worker_waits_no_longer_for_the_driver_of_a_job_that_is_closed(make: MakeDriver) -> None:
    driver = make("a")
    driver.heartbeat_ms = SELDOM_MS
    driver.give("a", freeze=False)
    on_its_way = leaving(driver, "a")
    driver.workers["a"].ask(requests.CloseJob(**driver.job))
    wait_until(lambda: not on_its_way.is_alive())
    assert JOB not in driver.workers["a"].ask(requests.Health()).jobs
