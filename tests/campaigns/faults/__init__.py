"""Fault points, and the matrix of every job with every fault and every other job: see README.md."""
