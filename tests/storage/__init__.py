"""The storage layer against local files, memory and an S3 server."""
