"""The supervisor: a service that maintains the tables of a configuration file."""
