"""Spark's applyInPandasWithState: a function of a key, its frames and a GroupState, run as a processor."""
