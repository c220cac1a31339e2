"""Not there: an operator's installation has no pandas, which pyarrow imports wherever it finds it."""

raise ImportError("pandas is not installed")
