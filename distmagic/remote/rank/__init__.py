"""One rank: calls the user's function and tells its progress."""
