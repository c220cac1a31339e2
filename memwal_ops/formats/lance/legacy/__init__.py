"""Tables with the MemWAL index of Lance 0.31 to 1.x: their states, publication, MemTables, replay and writer."""
