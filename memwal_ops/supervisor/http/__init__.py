"""Serve pages, health, metrics, status and actions over HTTP."""
