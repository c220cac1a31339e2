"""Decode, check and encode the files of an index folder; docs/formats/lm-diskann.md specifies them."""
