"""Runbooks, executed: each page's commands on a table that is in the state of which the page speaks."""
