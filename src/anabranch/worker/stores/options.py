"""Which store a worker uses, and where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from anabranch.core.schemas import StageSpec
from anabranch.worker.state.rows import VariableCodec
from anabranch.worker.stores import Backend, Store, StorePlace, store_kind


@dataclass(frozen=True)
class StoreOptions:
    """The same for all jobs of a worker."""

    kind: str
    #: Where a store on disk puts its files; None if there is none.
    directory: Path | None = None
    redis_url: str = ""

    @cached_property
    def backend(self) -> Backend:
        """The stores of this worker, made when the first job needs them."""
        kind = store_kind(self.kind)
        kind.check_installed()
        return kind.backend(StorePlace(self.directory, self.redis_url))

    def open(self, job: str, stage: StageSpec, variable: str, key_groups: int) -> Store:
        """Opens the store of one state variable."""
        shape = VariableCodec(stage.layouts[variable]).shape(key_groups)
        return self.backend.open(shape, job, stage, variable)
