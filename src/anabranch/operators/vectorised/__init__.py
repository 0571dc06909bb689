"""The vectorised processor: a user's function on the columns of all keys of a partition at once."""
