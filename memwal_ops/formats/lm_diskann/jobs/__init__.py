"""The jobs of an index folder."""
