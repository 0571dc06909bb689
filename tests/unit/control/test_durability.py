"""When epochs are made durable, if not every one is: after a while, when there are many, and when somebody waits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from anabranch.checkpoint.manifests import newest_writers
from anabranch.checkpoint.statefiles import StateFiles
from anabranch.checkpoint.storage import Storage
from anabranch.control.epochs.durability import Durability
from anabranch.control.owned_checkpoint import Committed, OwnedCheckpoint, claim
from anabranch.core.ids import NO_EPOCH, Epoch, RouteVersion, Run
from support.rescaling import wait_until


@pytest.fixture
def owned(tmp_path: Path) -> OwnedCheckpoint:
    return claim(str(tmp_path), [], 8)


@pytest.fixture
def durability() -> Durability:
    return Durability(Committed(NO_EPOCH, None), StateFiles(NO_EPOCH, None, ()), 3600.0)


def write(durability: Durability, owned: OwnedCheckpoint, epoch: int) -> None:
    durability.write(owned, RouteVersion(0), [], {Epoch(n): Run(n) for n in range(epoch + 1)})


def test_an_epoch_that_somebody_waits_for_is_due(durability: Durability, owned: OwnedCheckpoint) -> None:
    durability.volatile[Epoch(0)] = Run(0)
    assert not durability.is_due
    waited: list[bool] = []
    waiting = threading.Thread(target=lambda: waited.append(durability.wait_until_durable(Epoch(0), 30)))
    waiting.start()
    wait_until(lambda: durability.is_due)
    write(durability, owned, 0)
    waiting.join(30)
    assert waited == [True]
    assert (durability.is_due, durability.volatile) == (False, {})
    assert list(newest_writers(Storage(owned.storage.location))) == [0]


def test_who_asks_for_an_epoch_that_is_durable_takes_nothing_back(
    durability: Durability, owned: OwnedCheckpoint
) -> None:
    """Somebody else waits for a later one."""
    write(durability, owned, 0)
    durability.volatile[Epoch(1)] = Run(1)
    waiting = threading.Thread(target=durability.wait_until_durable, args=(Epoch(1), 30), daemon=True)
    waiting.start()
    wait_until(lambda: durability.is_due)
    assert durability.wait_until_durable(Epoch(0), 30)
    assert durability.is_due
    write(durability, owned, 1)
    waiting.join(30)
    assert not waiting.is_alive()


def test_nobody_waits_for_a_job_that_has_ended(durability: Durability) -> None:
    durability.close()
    assert not durability.wait_until_durable(Epoch(0), 30)
