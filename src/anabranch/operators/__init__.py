"""The stateful stages: aggregate, window, join, dedup, process; written on the state client."""
