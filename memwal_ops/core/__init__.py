"""The format-independent parts: jobs, leases, options, garbage collection. Imports no format."""
