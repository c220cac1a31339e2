"""Read and write MemWAL in Lance tables: regions, flushed generations, write-ahead log, region snapshots."""
