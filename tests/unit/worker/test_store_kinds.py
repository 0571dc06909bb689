"""Kinds of stores: all that a kind is stands in one module, one more can be registered, and none is loaded in vain."""

import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.core.errors import SettingsError
from anabranch.worker.server.process import WorkerOptions, run_worker
from anabranch.worker.stores import STORES, SharedStore, store_kind
from anabranch.worker.stores.options import StoreOptions
from support.keyed_state import KEYS, SPEC, entries
from support.own_store import NAME, registered
from support.state_workers import CREDENTIALS, JOB, MakeDriver


def test_a_store_of_ones_own_is_registered_and_holds_the_state_of_a_job(make: MakeDriver) -> None:
    with registered() as applied:
        driver = make("a", "b", store=NAME)
        driver.give(dict.fromkeys(range(8), "b"))
        driver.run_epoch({key: entries(7) for key in KEYS[:10]})
        driver.run_epoch({})
        assert driver.scan_all() == driver.model
        assert set(applied) == {f"{SPEC.name}/{name}" for name in SPEC.layouts}
    assert NAME not in STORES


def test_a_kind_says_whether_workers_share_its_stores(tmp_path: Path) -> None:
    for name, kind in STORES.items():
        if not kind.is_shared:
            store = StoreOptions(name, tmp_path if kind.needs_directory else None).open(JOB, SPEC, "total", 8)
            assert not isinstance(store, SharedStore)
            store.destroy()
    assert [name for name, kind in STORES.items() if kind.is_shared] == ["redis"]


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SettingsError, match="'disk'; choose one of memory, rocksdb, redis"):
        store_kind("disk")


def test_without_its_package_redis_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    message = r"The store redis needs the package redis.*pip install 'anabranch\[redis\]'"
    with pytest.raises(SettingsError, match=message):
        StoreOptions("redis", redis_url="redis://localhost").open(JOB, SPEC, "total", 8)
    options = WorkerOptions("127.0.0.1", 0, "redis", "redis://localhost", None, CREDENTIALS, "w", exit_with_parent=True)
    with pytest.raises(SettingsError, match=message):
        run_worker(options)


def test_a_worker_loads_the_library_of_no_store_but_its_own() -> None:
    program = """
import sys
import anabranch.worker.server.fork_server, anabranch.worker.server.service
from anabranch.worker.stores import STORES, StorePlace
loaded = {"redis", "rocksdict"} & sys.modules.keys()
assert not loaded, loaded
STORES["memory"].backend(StorePlace())
assert not {"redis", "rocksdict"} & sys.modules.keys()
STORES["rocksdb"].backend(StorePlace())
assert {"redis", "rocksdict"} & sys.modules.keys() == {"rocksdict"}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
