"""The protocol between the Spark application and state workers; the only place that knows it."""
