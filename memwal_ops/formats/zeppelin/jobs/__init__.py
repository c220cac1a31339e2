"""The jobs of Zeppelin namespaces."""
