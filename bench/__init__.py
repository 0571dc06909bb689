"""Benchmarks: Anabranch and Spark's own state, both sides in one run. ``python -m bench NAME`` from the root."""
