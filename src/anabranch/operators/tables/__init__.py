"""Broadcast tables: small tables that change while a query runs, and that all of its tasks read."""
