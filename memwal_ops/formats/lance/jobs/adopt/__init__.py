"""Record decisions about regions and columns."""
