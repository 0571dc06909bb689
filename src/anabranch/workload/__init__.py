"""Events like Wikipedia's edits, to demonstrate and to measure with: as tables, as files, and as a Spark stream."""

from anabranch.workload.events import WorkloadSpec, event_schema, generate, generate_batches
from anabranch.workload.files import FilesWritten, write_files
from anabranch.workload.latency import Latencies, append_latencies, per_second, plot_latency, read_latencies
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
