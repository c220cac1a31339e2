"""The shared library: tables, regions, generations, the MemWAL index, and the one way to commit."""
