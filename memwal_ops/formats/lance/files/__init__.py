"""Read the files of a Lance table: datasets, single Lance files, version manifests, blobs."""
