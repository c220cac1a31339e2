"""A table's month in minutes: what maintenance writes, keeps and costs, beside other ways to maintain a table."""

import os

# Before pylance is imported: it warns at each of thousands of queries.
os.environ.setdefault("LANCE_LOG", "error")
