"""Files of a table that none of its versions refers to."""

from __future__ import annotations

from pathlib import Path

import lance


def unreferenced(uri: str) -> set[str]:
    """Data and deletion files that no version mentions."""
    known = set()
    for version in lance.dataset(uri).versions():
        for fragment in lance.dataset(uri, version=version["version"]).get_fragments():
            known |= {f"data/{file.path}" for file in fragment.metadata.files}
            deletion = fragment.metadata.deletion_file
            if deletion is not None:
                known.add(f"_deletions/{fragment.fragment_id}-{deletion.read_version}-{deletion.id}")
    here = [path for folder in ("data", "_deletions") for path in Path(uri, folder).glob("*")]
    names = {str(path.relative_to(uri)) for path in here}
    return {name for name in names if name not in known and name.rsplit(".", 1)[0] not in known}
