"""Who takes part in a job and who owns what: workers, their launchers and heartbeat, changes and rescales."""
