"""Contracts with the pinned pylance: what this project relies on and what it guards against.

A test that fails here after an upgrade of pylance is news, not a nuisance: read its docstring,
then decide what the project has to change.
"""
