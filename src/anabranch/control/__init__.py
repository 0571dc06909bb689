"""In the Spark driver: coordinator, membership, launchers, autoscaler, HTTP."""
