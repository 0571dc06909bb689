"""How key groups and their state come to a worker: ownership, sources, transfers and the drain."""
