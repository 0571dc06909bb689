"""Work that can wait: in threads that the system runs when others leave it a processor.

State moves in the background, and on a machine that tasks, driver and workers share, it would take half of the
processors from an epoch. The system knows better than any pause of ours when there is time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

#: As `nice` counts: such a thread gets a tenth of what others get, if they want it all.
_NICENESS = 10


def stand_back() -> None:
    """Let others run before the thread that calls this, for good: without privileges there is no way back."""
    if sys.platform == "linux":  # elsewhere, a thread has no priority of its own
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # then it does its work with the priority that it has
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def in_background(work: Callable[[], T]) -> T:
    """Do this in a thread that stands back, and wait for it.

    A thread of its own each time: work may wait for another worker, which may wait for other work here. It must not be
    the first to use what keeps threads of its own, such as Arrow's readers of files: these would stand back as well.
    """
    with ThreadPoolExecutor(max_workers=1, initializer=stand_back, thread_name_prefix="background") as pool:
        return pool.submit(work).result()
