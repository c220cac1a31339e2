"""Write the log of a region in the region layout: claim, MemTable, WAL entries, flush."""
