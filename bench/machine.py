"""What a result was measured on: without it, a number says nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("anabranch", "pyspark", "pyarrow", "numpy", "pandas", "rocksdict", "grpcio", "protobuf")
_DESCRIBE = ("git", "describe", "--always", "--dirty")
_ROOT = Path(__file__).resolve().parents[1]


def describe_machine(folder: Path, java: str) -> dict[str, Any]:
    """Return facts about this machine, its software and this run; `folder` is where the checkpoints go."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "revision": _revision(),
        "cores": psutil.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "processor": _processor(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "system": platform.platform(),
        "checkpoint_filesystem": _filesystem(folder),
        "load_average": list(os.getloadavg()),
        "versions": {"python": platform.python_version(), "java": java, **_versions()},
    }


def is_busy() -> bool:
    """Return whether others use so much of the machine that ratios are in doubt."""
    return os.getloadavg()[0] > 0.5 * (psutil.cpu_count() or 1)


def _versions() -> Mapping[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _revision() -> str:
    try:
        done = subprocess.run(
            _DESCRIBE,
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _processor() -> str:
    """Return the processor's name; Linux tells it in a file only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _filesystem(folder: Path) -> str:
    """Return the type of the file system that a directory is on."""
    place = folder.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in [place, *place.parents] if parent in mounts), "unknown")
