"""How key groups and their state come to a worker: ownership, sources, fetches and the drain."""
