"""Events of a store: a commit polls its table at once."""
