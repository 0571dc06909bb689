"""Aggregations over session windows: sessions that grow together are merged, whole columns at a time."""
