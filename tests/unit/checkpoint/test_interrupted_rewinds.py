"""Drivers that die while they go back and repeat epochs: whoever comes next repeats the same epochs, as they were."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from anabranch.checkpoint import rewind
from anabranch.checkpoint.manifests import Manifest, write_manifest
from anabranch.checkpoint.sparklog import last_committed_epoch, last_planned_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import NO_EPOCH, Epoch, Generation, RouteVersion, Run

#: Of seven epochs that Spark has planned it has committed all but the last; three are durable.
PLANNED, COMMITTED, DURABLE = 7, 6, 3
ORIGINAL = {Epoch(epoch): f"offsets of {epoch}".encode() for epoch in range(PLANNED)}


class KilledError(Exception):
    """Stands for the death of the driver's process."""


class MortalStorage(Storage):
    """Lets the driver die before one of the changes that it makes, or at the end."""

    def __init__(self, location: str, dies_at: int | None) -> None:
        super().__init__(location, durable=False)
        self._changes = itertools.count()
        self._dies_at = dies_at

    def _live_on(self) -> None:
        if next(self._changes) == self._dies_at:
            raise KilledError

    def delete(self, path: str) -> None:
        self._live_on()
        super().delete(path)

    def copy_to(self, path: str, other: Storage, other_path: str) -> None:
        self._live_on()
        super().copy_to(path, other, other_path)

    def write(self, path: str, content: bytes) -> None:  # type: ignore[override]
        self._live_on()
        super().write(path, content)


@dataclass
class Driver:
    """What a driver does with the checkpoint, and what Spark does for it."""

    storage: Storage
    #: The offsets of the epochs that have changed its state, in order, after those that it found.
    found: Epoch = NO_EPOCH
    ran: list[tuple[Epoch, bytes]] = field(default_factory=list)

    def start(self) -> None:
        """As control/resume.py and api/start.py do."""
        committed = last_committed_epoch(self.storage)
        self.found = rewind.newest_durable_epoch(self.storage, committed)
        if self.found < committed:
            rewind.rewind(self.storage, self.storage, self.found)
        for _ in rewind.repeated(self.storage):
            self.run_spark()
        self.run_spark()

    def run_spark(self) -> None:
        """One micro-batch: the last that was planned, if it is not committed, else a new one."""
        epoch = last_planned_epoch(self.storage)
        if epoch == last_committed_epoch(self.storage):
            epoch = Epoch(epoch + 1)
            self.storage.write(f"offsets/{epoch}", f"new offsets of {epoch}".encode())
        self.ran.append((epoch, self.storage.read(f"offsets/{epoch}")))
        self.make_durable(epoch)
        self.storage.write(f"commits/{epoch}", b"v1\n{}")

    def make_durable(self, epoch: Epoch) -> None:
        """Some of the epochs that are repeated become durable: those that are even."""
        if epoch % 2 == 0:
            for each in range(self.durable + 1, epoch + 1):
                manifest = Manifest(Epoch(each), Generation(1), Run(each), RouteVersion(0), ())
                write_manifest(Storage(self.storage.location, durable=False), manifest)

    @property
    def durable(self) -> Epoch:
        return rewind.newest_durable_epoch(self.storage, Epoch(1000))


def make_checkpoint(folder: Path, *, commits: int = COMMITTED) -> str:
    storage = Storage(str(folder), durable=False)
    for epoch, content in ORIGINAL.items():
        storage.write(f"offsets/{epoch}", content)
    for epoch in range(commits):
        storage.write(f"commits/{epoch}", b"v1\n{}")
    for epoch in range(DURABLE):
        write_manifest(storage, Manifest(Epoch(epoch), Generation(1), Run(epoch), RouteVersion(0), ()))
    return storage.location


def survives(location: str, dies_at: int | None) -> Driver | None:
    """The driver, if it has not died before everything was repeated."""
    driver = Driver(MortalStorage(location, dies_at))
    try:
        driver.start()
    except KilledError:
        return None
    return driver


def assert_right(driver: Driver) -> None:
    """Its state has had every epoch once, each with the offsets that it had at first, and then a new one."""
    expected = [(Epoch(epoch), ORIGINAL[Epoch(epoch)]) for epoch in range(driver.found + 1, PLANNED)]
    assert driver.ran[: len(expected)] == expected
    assert [(epoch, content[:3]) for epoch, content in driver.ran[len(expected) :]] in (
        [(PLANNED, b"new")],
        [(PLANNED + 1, b"new")],  # the one before died after that
    )


def changes_of_a_whole_run(folder: Path) -> int:
    storage = MortalStorage(make_checkpoint(folder), None)
    Driver(storage).start()
    return next(storage._changes)


def test_a_driver_that_dies_at_any_point_is_made_good_by_the_next(tmp_path: Path) -> None:
    changes = changes_of_a_whole_run(tmp_path / "whole")
    assert changes > 20
    for dies_at in range(changes):
        location = make_checkpoint(tmp_path / str(dies_at))
        assert survives(location, dies_at) is None
        second = survives(location, None)
        assert second is not None
        assert_right(second)


def test_so_is_one_that_dies_while_it_makes_good_what_another_has_left(tmp_path: Path) -> None:
    changes = changes_of_a_whole_run(tmp_path / "whole")
    for dies_at, then in itertools.product(range(0, changes, 3), range(0, changes, 2)):
        location = make_checkpoint(tmp_path / f"{dies_at}-{then}")
        assert survives(location, dies_at) is None
        last = survives(location, then) or survives(location, None)
        assert last is not None
        assert_right(last)


def test_epochs_that_spark_has_committed_again_are_not_repeated(tmp_path: Path) -> None:
    """A driver has died after Spark's commit of a repeated epoch, or when it had only put some aside."""
    storage = Storage(make_checkpoint(tmp_path / "checkpoint"), durable=False)
    for epoch in (3, 4, 5, 6):
        storage.copy_to(f"offsets/{epoch}", storage, f"anabranch/replay/{epoch}")
    repeated = []
    for epoch in rewind.repeated(storage):
        repeated.append(epoch)
        storage.write(f"commits/{epoch}", b"v1\n{}")
    assert repeated == [6]
    assert rewind.pending(storage) == []


def test_epochs_that_were_not_put_aside_are_repeated_after_those_that_were(tmp_path: Path) -> None:
    storage = Storage(make_checkpoint(tmp_path / "checkpoint", commits=2), durable=False)
    for epoch in (2, 3):
        storage.copy_to(f"offsets/{epoch}", storage, f"anabranch/replay/{epoch}")
    repeated = []
    for epoch in rewind.repeated(storage):
        repeated.append((epoch, storage.read(f"offsets/{epoch}")))
        storage.write(f"commits/{epoch}", b"v1\n{}")
    assert repeated == [(epoch, content) for epoch, content in ORIGINAL.items() if epoch >= 2]


@pytest.mark.parametrize("left", range(PLANNED))
def test_what_spark_repeats_is_the_newest_that_it_has_planned(tmp_path: Path, left: int) -> None:
    """Spark runs the newest epoch in its log, whatever is missing before it."""
    storage = Storage(make_checkpoint(tmp_path / "checkpoint", commits=0), durable=False)
    for epoch, content in ORIGINAL.items():
        storage.write(f"anabranch/replay/{epoch}", content)
        if epoch > left:
            storage.delete(f"offsets/{epoch}")
    for epoch in rewind.repeated(storage):
        assert last_planned_epoch(storage) == epoch
        storage.write(f"commits/{epoch}", b"v1\n{}")
    assert last_planned_epoch(storage) == PLANNED - 1
