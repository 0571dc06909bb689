"""Whether histories show a mistake that somebody made on purpose."""

from __future__ import annotations

from collections.abc import Iterable

from epoch_application import Application
from epoch_history import History

from anabranch.core.epochs import EpochMachine
from anabranch.core.errors import AnabranchError
from anabranch.core.transactions import TransactionMachine

#: Within this many histories every mistake must be found.
HISTORIES_MAX = 1000


def is_found(
    histories: Iterable[History],
    worker_machine: type[TransactionMachine] = TransactionMachine,
    driver_machine: type[EpochMachine] = EpochMachine,
) -> bool:
    for history in histories:
        try:
            Application(history, worker_machine, driver_machine).run()
        except (AssertionError, AnabranchError, KeyError, TypeError):
            return True
    return False
