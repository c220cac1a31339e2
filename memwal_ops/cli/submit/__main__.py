"""Print where the program for ``spark-submit`` lies."""

from __future__ import annotations

import os

import click

if __name__ == "__main__":
    click.echo(os.path.join(os.path.dirname(os.path.abspath(__file__)), "memwal_ops_merge.py"))
