"""Builders of real tables for tests: workloads, layouts, and damage.

Nothing here imports the project (but for its errors), so that a fault of the project cannot
hide itself in the tables or in the readers that judge it.
"""
