"""The four layouts of a table: ``none``, ``legacy``, ``region`` and ``shard``, each an object that jobs call."""
