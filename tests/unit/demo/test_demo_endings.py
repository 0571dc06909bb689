"""When a run ends: once every row is through and no rescale is under way that will be done, or when its time is up."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from anabranch.demo.meter import RescaleFigures, RunFigures
from anabranch.demo.options import DemoOptions
from anabranch.demo.outcome import Ending
from anabranch.demo.run import Middle, _watch
from anabranch.demo.session import StopRequest

UNDER_WAY = RescaleFigures(number=1, what="4 workers", state="migrating", asked_ms=0, ended_ms=None, first_epoch=3)
DONE = msgspec.structs.replace(UNDER_WAY, state="done", ended_ms=5)


class FakeMeter:
    """A run of which a second passes with each look."""

    def __init__(self, rows: int, rescale: RescaleFigures) -> None:
        self.elapsed_s = 0.0
        self._rows = rows
        self._rescale = rescale

    def read(self) -> RunFigures:
        self.elapsed_s += 1
        return RunFigures(self.elapsed_s, 3, None, self._rows, 0, 0.0, 0.0, {}, (), rescales=(self._rescale,))

    def read_rescales(self) -> tuple[RescaleFigures, ...]:
        self.elapsed_s += 1
        return (self._rescale,)


@pytest.mark.parametrize(
    ("drain", "rows", "rescale", "ending"),
    [
        (True, 200, DONE, Ending.COMPLETE),
        (True, 200, UNDER_WAY, Ending.TIME),
        (True, 199, DONE, Ending.TIME),
        (False, 200, UNDER_WAY, Ending.COMPLETE),  # without a drain, there is nothing to wait for
        (False, 199, UNDER_WAY, Ending.TIME),
    ],
)
def test_a_run_is_complete_when_all_rows_are_through_and_what_will_be_done_is_done(
    drain: bool, rows: int, rescale: RescaleFigures, ending: Ending
) -> None:
    options = DemoOptions(seconds=2, rate=100, rescale_to=0, drain=drain, drain_limit_s=3)
    meter: Any = FakeMeter(rows, rescale)
    query: Any = SimpleNamespace(isActive=True)
    view: Any = SimpleNamespace(show=lambda *_: None)
    assert _watch(query, meter, options, Middle(options, None), view, StopRequest()) is ending
