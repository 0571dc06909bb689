"""The durable form of a job's state, beside Spark's own offsets and commits: the truth that workers are caches of."""
