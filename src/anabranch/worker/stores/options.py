"""Which store a worker uses, and where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from anabranch.checkpoint import paths
from anabranch.core.ids import checked_job_id
from anabranch.core.schemas import StageSpec
from anabranch.worker.stores import Store, open_store
from anabranch.worker.stores.redis import RedisConnection, connect
from anabranch.worker.stores.shared import prefix_of


@dataclass(frozen=True)
class StoreOptions:
    """The same for all jobs of a worker."""

    kind: str
    #: Where a store on disk puts its files; None if there is none.
    directory: Path | None = None
    redis_url: str = ""

    @cached_property
    def connection(self) -> RedisConnection | None:
        """The way to the shared store, if that is what is used."""
        return connect(self.redis_url) if self.kind == "redis" else None

    def folder(self, job: str) -> Path | None:
        """Where the files of a job are."""
        return None if self.directory is None else self.directory / checked_job_id(job)

    def open(self, job: str, spec: StageSpec, variable: str, key_groups: int) -> Store:
        """The store of one state variable."""
        folder = self.folder(job)
        path = folder / paths.safe_name(spec.name) / paths.safe_name(variable) if folder else None
        prefix = f"{prefix_of(job)}:{spec.number}:{paths.safe_name(variable)}"
        remote = (self.connection, prefix) if self.connection is not None else None
        return open_store(self.kind, spec.layouts[variable], key_groups, path, remote)
