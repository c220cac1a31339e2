"""Every decoder against hostile bytes: ``make fuzz``, and a short run among the tests."""
