"""Scheduling: which jobs are due, and which runs next."""
