"""What users touch: streams, writers, queries, settings."""
