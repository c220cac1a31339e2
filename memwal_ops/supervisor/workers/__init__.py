"""Worker processes: the loop that runs in them, their pools, and the protocol between them and the supervisor."""
