"""Writers, mergers, builders, collectors and readers as processes that are killed: see README.md here."""
