"""Joins of two streams: rows of both sides wait in the state for their matches."""
