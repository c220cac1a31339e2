"""Other programs that write, read and maintain the same tables, each with its real package: ``make neighbours``."""
