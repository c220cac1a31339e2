"""The table formats: each package opens one kind of table and brings the jobs that apply to it."""
