"""Built-in aggregates: Spark pre-aggregates each epoch in the JVM, tasks merge columns with state."""
