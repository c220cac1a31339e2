"""Read regions: their manifests, specs and key files. Nothing here opens the table."""
