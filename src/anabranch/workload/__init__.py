"""Events like Wikipedia's edits, to demonstrate and to measure with: as tables, as files, and as a Spark stream."""

from typing import TYPE_CHECKING, Any

from anabranch.workload.events import WorkloadSpec, event_schema, generate, generate_batches
from anabranch.workload.files import FilesWritten, write_files
from anabranch.workload.latency import Latencies, append_latencies, per_second, read_latencies
from anabranch.workload.plot import plot_latency

if TYPE_CHECKING:
    from anabranch.workload.source import register

__all__ = [
    "FilesWritten",
    "Latencies",
    "WorkloadSpec",
    "append_latencies",
    "event_schema",
    "generate",
    "generate_batches",
    "per_second",
    "plot_latency",
    "read_latencies",
    "register",
    "write_files",
]


def __getattr__(name: str) -> Any:
    # The command line writes files without Spark, and must not wait for its import.
    if name == "register":
        from anabranch.workload.source import register

        return register
    raise AttributeError(f"module 'anabranch.workload' has no attribute {name!r}")
