"""Lance tables: base table, MemWAL, and the jobs that maintain them."""
