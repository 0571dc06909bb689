"""Being told to stop: once is a request, twice is an order, and children do not hear it."""

import signal
import subprocess
import sys
import threading

import pytest

from anabranch.demo.session import StopRequest, children_without_interrupts, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_insists(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    stop = StopRequest()
    with stop_on_signals(stop):
        assert not stop.wait(0)
        signal.raise_signal(number)
        assert stop.wait(60)
        assert stop.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is former


def test_waiting_ends_when_the_end_is_asked_for() -> None:
    stop = StopRequest()
    threading.Timer(0.05, stop.ask).start()
    assert stop.wait(60)


def test_children_do_not_notice_ctrl_c() -> None:
    program = "import signal; signal.raise_signal(signal.SIGINT); print('still here')"
    command = [sys.executable, "-c", program]
    with children_without_interrupts():
        spared = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert spared.stdout == "still here\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    interrupted = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert interrupted.stdout == ""
