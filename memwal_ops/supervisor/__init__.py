"""The supervisor: maintains many tables by a configuration file, day and night."""
