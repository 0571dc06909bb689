"""De-duplication: of all rows with the same key, only the first goes out."""
