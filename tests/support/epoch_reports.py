"""Reports of epochs in which nothing happened, but for what a test says."""

from typing import Any

from anabranch.core.reports import EpochReport


def epoch_report(epoch: int, **fields: Any) -> EpochReport:
    """The report of an epoch; `fields` are those that matter to the test."""
    usual: dict[str, Any] = {
        "run": epoch,
        "route_version": 0,
        "workers": 2,
        "durable_epoch": 0,
        "repairs": [],
        "changes": [],
        "migrating": False,
        "changed_rows": 0,
        "changed_bytes": 0,
        "changed_variables": [],
        "dropped_rows": [],
        "duration_ms": {"sink": 7},
        "watermark_ms": None,
    }
    return EpochReport(epoch=epoch, **usual | fields)
