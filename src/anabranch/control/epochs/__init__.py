"""What happens to an epoch in the driver: its requests to workers, its manifest, and the upkeep that follows."""
