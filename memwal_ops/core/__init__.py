"""What every format shares: jobs, leases, options, garbage collection. Does not depend on any format."""
