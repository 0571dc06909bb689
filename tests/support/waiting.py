"""Waiting in tests for something that happens elsewhere: in another thread, or in another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 60.0
_LOOK_INTERVAL_S = 0.01


def wait_until(condition: Callable[[], Any], what: str = "it is so", timeout_s: float = WAIT_S) -> None:
    """Looks until the condition is true; fails if that takes too long."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s until {what}"
        pause.wait(_LOOK_INTERVAL_S)
