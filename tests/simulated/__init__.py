"""The world that coordinator and workers are simulated in: threads, clocks, network, storage, Spark, and its faults."""
