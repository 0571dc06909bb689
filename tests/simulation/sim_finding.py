"""Whether histories show a mistake that somebody made on purpose."""

from __future__ import annotations

from collections.abc import Iterable

from sim_application import Application
from sim_history import History
from sim_runs import Draw, quick_histories

from anabranch.core.errors import AnabranchError

#: Within this many histories every mistake must be found.
HISTORIES_MAX = 1000


def is_found(draw: Draw, seeds: Iterable[int] = range(HISTORIES_MAX)) -> bool:
    with quick_histories():
        return any(_fails(draw(seed)) for seed in seeds)


def _fails(history: History) -> bool:
    try:
        Application(history).run()
    except (AssertionError, AnabranchError, KeyError, TypeError, IndexError):
        return True
    return False
