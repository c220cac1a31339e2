"""Decode and encode the objects of Zeppelin namespaces, in both dialects. No I/O."""
