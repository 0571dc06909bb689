"""Event time as tests give it: a datetime, or milliseconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime


def milliseconds(moment: datetime | int) -> int:
    """Since 1970. A datetime without a time zone is in UTC."""
    if isinstance(moment, int):
        return moment
    return round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)
