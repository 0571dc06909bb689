"""The HTTP API of a job: server, access rules, endpoints and their description."""
