"""The state worker: a Flight service over layered, typed state."""
