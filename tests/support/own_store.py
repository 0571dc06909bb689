"""A kind of store that does not come with Anabranch, as somebody would add one: it keeps rows, and counts changes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from anabranch.core.schemas import StageSpec
from anabranch.worker import stores
from anabranch.worker.state.rows import Changes, Shape
from anabranch.worker.stores import Backend, StoreKind, StorePlace
from anabranch.worker.stores.memory import MemoryStore

NAME = "counting"


class CountingStore(MemoryStore):
    """See Store."""

    def __init__(self, shape: Shape, applied: Counter[str], variable: str) -> None:
        super().__init__(shape)
        self._applied = applied
        self._variable = variable

    def apply(self, changes: Changes) -> None:
        self._applied[self._variable] += len(changes)
        super().apply(changes)


class CountingBackend:
    """See Backend."""

    def __init__(self, place: StorePlace, applied: Counter[str]) -> None:
        assert place.directory is None, "a store without files gets no directory"
        self._applied = applied

    def open(self, shape: Shape, job: str, stage: StageSpec, variable: str) -> CountingStore:
        del job
        return CountingStore(shape, self._applied, f"{stage.name}/{variable}")

    def close_job(self, job: str) -> None: ...

    def wipe(self, job: str) -> None: ...


@contextmanager
def registered() -> Iterator[Counter[str]]:
    """The kind is known meanwhile. Gives how many changes each variable has had."""
    applied: Counter[str] = Counter()

    def backend(place: StorePlace) -> Backend:
        return CountingBackend(place, applied)

    stores.register(StoreKind(NAME, backend))
    try:
        yield applied
    finally:
        stores.unregister(NAME)
