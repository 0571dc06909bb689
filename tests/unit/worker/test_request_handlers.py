"""Every request has a place where it is answered."""

from __future__ import annotations

from collections import Counter

from anabranch.core.ids import JobId, WorkerId
from anabranch.core.requests import REQUESTS
from anabranch.wire.credentials import Credentials
from anabranch.worker.server.job import WorkerJob
from anabranch.worker.server.jobs import WorkerJobs
from anabranch.worker.stores.options import StoreOptions


def test_every_type_of_request_has_exactly_one_handler() -> None:
    stores = StoreOptions("memory")
    jobs = WorkerJobs(WorkerId("w"), stores, Credentials())
    job = WorkerJob(WorkerId("w"), JobId("0" * 32), stores, Credentials())
    handlers = Counter([*jobs.handlers, *job.handlers, *job.exchanges, *job.streams])
    assert handlers == Counter(REQUESTS)
    job.close()
