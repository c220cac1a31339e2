"""What ``verify`` checks of a Lance table, by part. Each check reads only and yields findings."""
