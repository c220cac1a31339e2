"""The jobs of tables with the legacy MemWAL index."""
