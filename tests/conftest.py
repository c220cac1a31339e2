"""Fixtures that every test may use."""

pytest_plugins = ["tests.s3_server", "tests.spark"]
