"""Tests of memwal-ops, against real Lance tables."""
