"""Pure decisions: ids, key groups, routes, epochs. No threads, clocks, sockets, Spark or files in here."""
