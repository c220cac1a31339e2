"""Divide the tables of a configuration among several supervisors."""
