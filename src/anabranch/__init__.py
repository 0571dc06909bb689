"""Anabranch: elastic, disaggregated state for PySpark Structured Streaming."""
