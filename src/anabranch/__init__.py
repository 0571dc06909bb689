"""Anabranch: elastic, disaggregated state for PySpark Structured Streaming."""

from typing import TYPE_CHECKING, Any

from anabranch.core.errors import (
    AnabranchError,
    CheckpointError,
    EpochError,
    FencedError,
    LostWorkerError,
    SettingsError,
    UnsupportedError,
    WorkerError,
)

if TYPE_CHECKING:
    from anabranch.api.enable import disable, enable
    from anabranch.api.query import StreamQuery
    from anabranch.api.stream import Stream, stream
    from anabranch.core.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "AnabranchError",
    "BroadcastTable",
    "CheckpointError",
    "EpochError",
    "FencedError",
    "LostWorkerError",
    "Settings",
    "SettingsError",
    "Stream",
    "StreamQuery",
    "UnsupportedError",
    "WorkerError",
    "__version__",
    "broadcast",
    "disable",
    "enable",
    "stream",
]

_LAZY = {
    "broadcast": "anabranch.api.broadcast",
    "BroadcastTable": "anabranch.api.broadcast",
    "disable": "anabranch.api.enable",
    "enable": "anabranch.api.enable",
    "stream": "anabranch.api.stream",
    "Stream": "anabranch.api.stream",
    "StreamQuery": "anabranch.api.query",
    "Settings": "anabranch.core.settings",
}


def __getattr__(name: str) -> Any:
    # State workers and tasks import this package too, and must not pay for importing PySpark's SQL half.
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
