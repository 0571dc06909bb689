"""Readers share the lock, a writer has it alone, and is not kept out by readers who keep coming."""

import threading

from anabranch.worker.stores.memory import ReadWriteLock

TIMEOUT_S = 10.0
A_MOMENT_S = 0.1


def test_readers_share_the_lock() -> None:
    lock, together = ReadWriteLock(), threading.Barrier(2, timeout=TIMEOUT_S)

    def read() -> None:
        with lock.reading():
            together.wait()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not together.broken


def test_a_writer_has_the_lock_alone_and_goes_before_new_readers() -> None:
    lock, order = ReadWriteLock(), []
    writer_has_it, writer_may_go = threading.Event(), threading.Event()

    def write() -> None:
        with lock.writing():
            writer_has_it.set()
            writer_may_go.wait(TIMEOUT_S)
            order.append("writer")

    def read() -> None:
        with lock.reading():
            order.append("reader")

    writer, late = threading.Thread(target=write), threading.Thread(target=read)
    with lock.reading():
        writer.start()
        assert not writer_has_it.wait(A_MOMENT_S)
        late.start()
        late.join(A_MOMENT_S)
        assert late.is_alive()
    assert writer_has_it.wait(TIMEOUT_S)
    late.join(A_MOMENT_S)
    assert late.is_alive()
    writer_may_go.set()
    for thread in (writer, late):
        thread.join(TIMEOUT_S)
    assert order == ["writer", "reader"]


def test_the_lock_is_free_again_after_an_error() -> None:
    lock = ReadWriteLock()
    for use in (lock.reading, lock.writing):
        try:
            with use():
                raise ValueError
        except ValueError:
            pass
    with lock.writing():
        pass
