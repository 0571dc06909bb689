"""In the Spark driver and its tasks: the epoch loop, the task body, sinks."""
