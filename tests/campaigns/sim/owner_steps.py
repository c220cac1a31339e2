"""Steps of a table's owner: tags, branches, holds, restores, columns and indexes."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import lance
import pyarrow as pa

from memwal_ops import open_table
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.errors import VersionGoneError
from tests.campaigns.sim.driver import Driver
from tests.support.tables import wire
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from collections.abc import Callable


class OwnerSteps(Driver):
    """What keeps versions, and what changes the table without a job."""

    def _tag(self) -> bool:
        name = self._name("tag")
        self.tags[name] = self.rng.choice(self._versions())
        lance.dataset(self.uri).tags.create(name, self.tags[name])
        return True

    def _untag(self) -> bool:
        if not self.tags:
            return False
        name = self.rng.choice(sorted(self.tags))
        lance.dataset(self.uri).tags.delete(name)
        del self.tags[name]
        return True

    def _branch(self) -> bool:
        name = self._name("branch")
        self.branches[name] = self.rng.choice(self._versions())
        lance.dataset(self.uri).create_branch(name, self.branches[name])
        return True

    def _unbranch(self) -> bool:
        if not self.branches:
            return False
        name = self.rng.choice(sorted(self.branches))
        lance.dataset(self.uri).branches.delete(name)
        del self.branches[name]
        return True

    def _hold(self) -> bool:
        version = self.rng.choice(self._versions())
        try:
            hold = take_hold(open_table(self.uri), version, timedelta(days=3))
        except VersionGoneError:
            assert self.announced
            return False
        self.holds[hold.number] = version
        return True

    def _release(self) -> bool:
        if not self.holds:
            return False
        number = self.rng.choice(sorted(self.holds))
        release_hold(open_table(self.uri), number)
        del self.holds[number]
        return True

    def _restore(self) -> bool:
        """An old version is the newest again: with its rows, columns, indexes, and its progress, which falls."""
        with_mem_wal = [
            number
            for number, path in wire.manifest_names(Files(self.uri)).items()
            if wire.mem_wal_entry(wire.parse_manifest(Files(self.uri).get(path))) is not None
        ]
        version = self.rng.choice(sorted(with_mem_wal))
        before = wire.progress(Files(self.uri))
        dataset = lance.dataset(self.uri, version=version)
        dataset.restore()
        newest = lance.dataset(self.uri)
        self.witness.restored.add(newest.version)
        self._say(f"version {version} as {newest.version}")
        if self.made.columns.changed:
            self.made.evolve(newest)
        return wire.progress(Files(self.uri)) != before

    def _owner(self) -> bool:
        """pylance's own maintenance."""
        dataset = lance.dataset(self.uri)
        before = dataset.version
        if self.rng.random() < 0.5:
            dataset.optimize.compact_files()
        else:
            dataset.optimize.optimize_indices()
        return lance.dataset(self.uri).version > before

    def _evolve(self, change: Callable[[lance.LanceDataset], object]) -> bool:
        self.made.columns.names.setdefault(0, tuple(self.made.base_schema.names))
        dataset = lance.dataset(self.uri)
        change(dataset)
        self.made.evolve(lance.dataset(self.uri))
        return True

    def _add_column(self) -> bool:
        if self.witness.restored:
            # A restored version's next field takes a number that rows of the log may have under another type.
            self.made.flush()
        kind = self.rng.choice([pa.int32(), pa.string(), pa.float32()])
        return self._evolve(lambda dataset: dataset.add_columns(pa.field(self._name("more").replace("-", "_"), kind)))

    def _payload(self) -> list[str]:
        return [name for name in lance.dataset(self.uri).schema.names if name not in self.made.model.keys]

    def _drop_column(self) -> bool:
        names = self._payload()
        if len(names) < 2:
            return False
        # A writer that is replaced leaves its log by the names of its time: nothing of it is left to be read then.
        self.made.flush()
        return self._evolve(lambda dataset: dataset.drop_columns([self.rng.choice(names)]))

    def _rename_column(self) -> bool:
        names = self._payload()
        if not names:
            return False
        self.made.flush()
        old, new = self.rng.choice(names), self._name("other").replace("-", "_")
        self.made.columns.traits[new] = self.made.columns.trait(old)
        return self._evolve(lambda dataset: dataset.alter_columns({"path": old, "name": new}))

    def _create_index(self) -> bool:
        """A new one, or one in the place of another."""
        dataset = lance.dataset(self.uri)
        name = self.rng.choice(dataset.schema.names)
        dataset.create_scalar_index(name, "BTREE", name=f"{self.made.columns.trait(name)}_idx", replace=True)
        return True

    def _drop_index(self) -> bool:
        dataset = lance.dataset(self.uri)
        names = sorted(one.name for one in dataset.describe_indices() if not one.name.startswith("__"))
        if names:
            dataset.drop_index(self.rng.choice(names))
        return bool(names)
