"""Runs Spark's own StatefulProcessor classes, unchanged, against a local copy of state, in columns."""
