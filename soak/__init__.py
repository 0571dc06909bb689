"""The soak: real queries in real processes, disturbed at random for minutes. ``python -m soak`` from the root."""
