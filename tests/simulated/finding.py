"""Whether histories show a mistake that somebody made on purpose."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.core.errors import AnabranchError
from simulated.application import Application
from simulated.history import History
from simulated.runs import Draw, quick_histories

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
