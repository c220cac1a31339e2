"""Carry out the passes of a merge, in one process."""
