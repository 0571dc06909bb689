"""Work in the background stands back, and others do not."""

import os
import sys
import threading

import pytest

from anabranch.runtime.threads import THREADS

in_background = THREADS.in_background


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a thread has no priority of its own")
def test_only_the_thread_of_the_work_stands_back() -> None:
    before = priority()
    assert in_background(priority) == max(10, before)
    assert priority() == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a thread has no priority of its own")
def test_who_stands_back_further_already_stays_there() -> None:
    def from_behind() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        return in_background(priority)  # threads have the priority of who starts them

    assert in_background(from_behind) == 15


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a thread has no priority of its own")
def test_work_is_done_where_priorities_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert in_background(lambda: 1) == 1


def test_an_error_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        in_background(fail)


def test_work_may_wait_for_other_work() -> None:
    assert in_background(lambda: in_background(lambda: 1)) == 1
