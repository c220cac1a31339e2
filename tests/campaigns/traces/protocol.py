"""The protocols of a Lance table as an automaton: it accepts a trace, or names the first event that is forbidden.

The rules are those of docs/models (commit.pml, collect.pml, claim.pml) and of leases, on what the events show. It reads
manifests by a decoder of the tests, and knows nothing of the product. Whatever others do is taken as it is, but for
progress, which no program may take back except by a restore.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.campaigns.sim.seen import files_of, job_of, progress_of
from tests.support.tables import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.campaigns.traces.recorder import Event

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_RESTORE = 106
_U64 = 2**64 - 1
#: What may be written without a condition: hints, marks that say the same twice, and files of a name that is new.
_UNCONDITIONAL = re.compile(
    r".*hint\.json|.*\.released|_transactions/.*|_indices/.*|_versions/d.*|_versions/[^-]+-.*|data/.*|_deletions/.*|tree/.*|"
    rf"_mem_wal/{_UUID}/[0-9a-f]{{8}}_gen_\d+/.*|_mem_wal_ops/(?!leases|holds|expiries).*"
)


class ForbiddenError(AssertionError):
    """An event that the protocols forbid."""


@dataclass
class Version:
    """A version that can be opened; ``progress`` is None without a MemWAL index."""

    data: bytes
    progress: dict[str, int] | None
    files: frozenset[str]


@dataclass
class Region:
    """What a region's folder shows.

    Attributes:
        listed: when each generation was listed first, of all that one of its manifests listed.
        merged: when a version first had each generation, by a rise of its progress.
        directories: when each was seen first.
        rows: per directory the log entries in which it has its rows.
    """

    manifest: wire.RegionManifest | None = None
    manifests: set[int] = field(default_factory=set)
    listed: dict[int, int] = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)
    directories: dict[str, int] = field(default_factory=dict)
    entries: set[int] = field(default_factory=set)
    rows: dict[str, frozenset[int]] = field(default_factory=dict)
    changed: int = 0  # the event that put the newest manifest


class Protocol:
    """The state of one table, by the events so far."""

    def __init__(self) -> None:
        self.versions: dict[int, Version] = {}
        self.branches: dict[str, frozenset[str]] = {}
        self.regions: dict[str, Region] = {}
        self.tags: dict[str, tuple[str | None, int]] = {}
        self.holds: dict[int, tuple[int, ...]] = {}
        self.announced: dict[int, tuple[tuple[int, ...], int]] = {}  # versions, and the event
        self.aside: dict[str, frozenset[int]] = {}  # the versions of each record
        self.numbered: dict[str, set[int]] = {}
        self.holds_read = 0
        self._kinds: tuple[tuple[re.Pattern[str], Callable[[Event, re.Match[str]], None]], ...] = tuple(
            (re.compile(pattern), rule)
            for pattern, rule in (
                (r"_versions/(\d{20})\.manifest", self._version),
                (r"tree/([^/]+)/_versions/(\d{20})\.manifest", self._branch),
                (r"_refs/tags/(.+)\.json", self._tag),
                (rf"_mem_wal/({_UUID})/manifest/([01]{{64}})\.binpb", self._manifest),
                (rf"_mem_wal/({_UUID})/wal/([01]{{64}})\.(?:lance|arrow)", self._entry),
                (rf"_mem_wal/({_UUID})/([0-9a-f]{{8}}_gen_(\d+))(/.*)?", self._generation),
                (r"_mem_wal_ops/(leases/[a-z]+|holds|expiries)/(\d{20})\.json", self._numbered),
                (r"_mem_wal_ops/holds/(\d{20})\.released", self._released),
                (r"_mem_wal_ops/expired/.+", self._set_aside),
                (r"(?:data|_deletions|_indices)/.+", self._file),
            )
        )

    @property
    def newest(self) -> int:
        """The newest version."""
        return max(self.versions, default=0)

    def accept(self, event: Event) -> None:
        """Take an event.

        Raises:
            ForbiddenError: no run of the protocols has it here.
        """
        if event.what == "list":
            if event.path.rstrip("/") == "_mem_wal_ops/holds":
                self.holds_read = event.number
            return
        if event.ours and event.what == "put":
            self._require(_UNCONDITIONAL.fullmatch(event.path) is not None, event, "it is written without a condition")
        for pattern, rule in self._kinds:
            found = pattern.fullmatch(event.path)
            if found is not None:
                rule(event, found)
                return

    @staticmethod
    def _require(holds: bool, event: Event, otherwise: str) -> None:
        if not holds:
            raise ForbiddenError(f"{event}: {otherwise}")

    # -- commit

    def _version(self, event: Event, found: re.Match[str]) -> None:
        number = _U64 - int(found[1])
        if event.what == "gone":
            if event.ours:
                self._may_expire(event, number)
            self.versions.pop(number, None)
            return
        assert event.data is not None
        version, job, restored = _decoded(event.data)
        before = self.versions.get(number - 1)
        if event.ours and number <= self.newest:
            # What an expiry set aside, and a tag or a hold still needs.
            self._require(self._is_aside(number), event, f"it is below version {self.newest}, and was not set aside")
        elif event.ours:
            self._require(number == self.newest + 1, event, f"the newest version is {self.newest}")
        if number > self.newest and not restored:
            self._progress(event, before or Version(b"", {}, frozenset()), version, job)
        self.versions[number] = version

    def _progress(self, event: Event, before: Version, version: Version, job: str | None) -> None:
        """Progress rises by merges, over what is listed; else it is that of the version before."""
        if before.progress is None or version.progress is None:
            return
        for region_id in before.progress.keys() | version.progress.keys():
            old, new = before.progress.get(region_id, 0), version.progress.get(region_id, 0)
            self._require(new >= old, event, f"progress of {region_id} falls from {old} to {new}")
            region = self.regions.setdefault(region_id, Region())
            risen = set(range(old + 1, new + 1))
            region.merged |= dict.fromkeys(risen, event.number)
            if not risen or not event.ours:
                continue
            self._require(job == "merge", event, f"a {job} raises progress of {region_id} to {new}")
            passed = risen - region.listed.keys()
            self._require(not passed, event, f"generations {sorted(passed)} of {region_id} were never listed")
            passed = risen - {int(path.rsplit("_", 1)[-1]) for path in region.directories}
            self._require(not passed, event, f"generations {sorted(passed)} of {region_id} have no directory")

    def _branch(self, event: Event, found: re.Match[str]) -> None:
        del found
        if event.what == "gone":
            self.branches.pop(event.path, None)
        elif event.data is not None:
            self.branches[event.path] = _decoded(event.data)[0].files

    # -- expiry

    def _tag(self, event: Event, found: re.Match[str]) -> None:
        if event.what == "gone":
            self.tags.pop(found[1], None)
        elif event.data is not None:
            document = json.loads(event.data)
            self.tags[found[1]] = document.get("branch"), int(document["version"])

    def _may_expire(self, event: Event, number: int) -> None:
        self._require(number < self.newest, event, "it is the newest version")
        tags = [name for name, tag in self.tags.items() if tag == (None, number)]
        self._require(not tags, event, f"it has the tags {tags}")
        held = [hold for hold, versions in self.holds.items() if number in versions]
        self._require(not held, event, f"the holds {held} keep it")
        told = [at for versions, at in self.announced.values() if number in versions]
        self._require(bool(told), event, "its expiry was not announced")
        self._require(self.holds_read > min(told), event, "holds were not read after its expiry was announced")
        self._require(self._is_aside(number), event, "its manifest was not set aside")

    def _is_aside(self, number: int) -> bool:
        return any(number in versions for versions in self.aside.values())

    def _set_aside(self, event: Event, found: re.Match[str]) -> None:
        del found
        if event.what == "gone":
            self.aside.pop(event.path, None)
            return
        line, _, rest = (event.data or b"").partition(b"\n")
        manifests = json.loads(line)["manifests"]
        for number, length in manifests:
            shown, rest = wire.parse_manifest(rest[:length]), rest[length:]
            self._require(shown.version == number, event, f"its manifest of {number} is another one")
        self._require(not rest, event, "it has more than its manifests")
        self.aside[event.path] = frozenset(number for number, _ in manifests)

    def _file(self, event: Event, found: re.Match[str]) -> None:
        del found
        if event.what != "gone" or not event.ours:
            return
        name = "/".join(event.path.split("/")[:2])
        naming = [number for number, version in self.versions.items() if name in version.files]
        self._require(not naming, event, f"the versions {naming} name it")
        trees = [path for path, files in self.branches.items() if name in files]
        self._require(not trees, event, f"the branches' versions {trees} name it")

    # -- regions

    def _manifest(self, event: Event, found: re.Match[str]) -> None:
        region = self.regions.setdefault(found[1], Region())
        number = wire.from_bit_reversed(found[2])
        if event.what == "gone":
            newest = max(region.manifests, default=0)
            self._require(not event.ours or number < newest, event, "it is the region's newest manifest")
            region.manifests.discard(number)
            if not region.manifests:  # it was removed; another one may get its id
                self.regions[found[1]] = replace(Region(), directories=region.directories, entries=region.entries)
            return
        assert event.data is not None
        manifest, before = wire.decode_region_manifest(event.data), region.manifest
        if event.ours:
            newest = max(region.manifests, default=0)
            self._require(number == manifest.version == newest + 1, event, f"the newest manifest is {newest}")
        if event.ours and before is not None:
            self._require(manifest.epoch >= before.epoch, event, f"the epoch was {before.epoch}")
            self._require(manifest.replay_after >= before.replay_after, event, "its replay position falls")
            self._require(manifest.current_generation >= before.current_generation, event, "its generation falls")
            for generation in before.generations.keys() - manifest.generations.keys():
                self._may_drain(event, found[1], generation)
        region.manifests.add(number)
        for generation in manifest.generations:
            region.listed.setdefault(generation, event.number)
        if number == max(region.manifests):
            region.manifest, region.changed = manifest, event.number

    def _may_drain(self, event: Event, region_id: str, generation: int) -> None:
        lacking = [
            number
            for number, version in self.versions.items()
            if version.progress is not None and version.progress.get(region_id, 0) < generation
        ]
        self._require(not lacking, event, f"the versions {lacking} lack generation {generation}, which it drops")
        region = self.regions[region_id]
        merged = region.merged.get(generation, 0) > region.listed[generation]
        self._require(merged, event, f"generation {generation}, which it drops, was not merged since it was listed")

    def _generation(self, event: Event, found: re.Match[str]) -> None:
        region = self.regions.setdefault(found[1], Region())
        name, number = found[2], int(found[3])
        if event.what != "gone":
            region.directories.setdefault(name, event.number)
            if found[4] is not None and found[4].endswith(".manifest") and event.data is not None:
                files = (path.rsplit("/", 1)[-1] for path in files_of(wire.parse_manifest(event.data)))
                logged = {wire.from_bit_reversed(file) for file in files if re.fullmatch(r"[01]{64}\.lance", file)}
                region.rows[name] = region.rows.get(name, frozenset()) | logged
            return
        if event.ours and region.manifest is not None:
            self._require(name not in region.manifest.generations.values(), event, "its region's manifest lists it")
            fenced = number < region.manifest.current_generation or region.changed > region.directories.get(name, 0)
            self._require(fenced, event, "its flush may still be published: no manifest was put since it was written")
        if found[4] is None:
            region.directories.pop(name, None)

    def _entry(self, event: Event, found: re.Match[str]) -> None:
        region = self.regions.setdefault(found[1], Region())
        number = wire.from_bit_reversed(found[2])
        if event.what != "gone":
            last = max(region.entries, default=region.manifest.replay_after if region.manifest else 0)
            self._require(not event.ours or number == last + 1, event, f"the log ends at {last}")
            region.entries.add(number)
            return
        if event.ours and region.manifest is not None:
            self._require(number < max(region.entries, default=0), event, "it is the last entry of its log")
            replayed = region.manifest.replay_after
            self._require(number <= replayed, event, f"it is not in a generation: {replayed} is the last that is")
            naming = [one for one in region.manifest.generations.values() if number in region.rows.get(one, ())]
            self._require(not naming, event, f"the generations {naming} have their rows in it")
        region.entries.discard(number)

    # -- leases and holds

    def _numbered(self, event: Event, found: re.Match[str]) -> None:
        numbers = self.numbered.setdefault(found[1], set())
        number = int(found[2])
        highest = max(numbers, default=0)
        if event.what == "gone":
            ends = found[1] == "expiries"
            self._require(ends or not event.ours or number < highest, event, "it is the highest number")
            numbers.discard(number)
            self.announced.pop(number, None) if ends else None
            return
        document = json.loads(event.data or b"{}")
        if found[1] == "holds":
            self.holds[number] = tuple(document["versions"])
        elif found[1] == "expiries":
            self.announced[number] = tuple(document["versions"]), event.number
        else:
            self._require(document["token"] <= number, event, f"its token is {document['token']}")
        self._require(not event.ours or number > highest, event, f"number {highest} was written before")
        numbers.add(number)

    def _released(self, event: Event, found: re.Match[str]) -> None:
        if event.what != "gone":
            self.holds.pop(int(found[1]), None)


def _decoded(data: bytes) -> tuple[Version, str | None, bool]:
    """A version, the job that made it, and whether it is a restore."""
    manifest = wire.parse_manifest(data)
    entry = wire.mem_wal_entry(manifest)
    progress = None if entry is None else progress_of(wire.decode(wire.mem_wal_details(manifest)))
    indexes = {f"_indices/{wire.uuid_of(one, 1)}" for one in wire.sub(wire.decode(manifest.index or b""), 1)}
    restored = any(one.number == _RESTORE for one in wire.decode(manifest.transaction or b""))
    return Version(data, progress, frozenset(files_of(manifest)) | indexes), job_of(manifest), restored
