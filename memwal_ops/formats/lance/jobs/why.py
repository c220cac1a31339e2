"""The why job: show every condition because of which an object is kept or deletable. Reads only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.candidates import Gate, Verdict
from memwal_ops.core.explanation import Explanation, Reason, covers
from memwal_ops.errors import GenerationMissingError, InvalidUsageError, ObjectNotFoundError
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.generations.region_identity import check_identity
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind, LanceCandidate
from memwal_ops.formats.lance.regions.manifests import is_id_prefix
from memwal_ops.formats.lance.retention.damage import names_damage
from memwal_ops.formats.lance.wire.names import MEM_WAL_FOLDER, parse_version_manifest_name, region_folder
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.options import RetentionOptions, WhyOptions
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import Store

_GENERATION = re.compile(r"[0-9]{1,20}")
_OF_THE_BASE = "of the base table: deleted with the last version that refers to it"
_GROUPED = {CandidateKind.WAL_ENTRY, CandidateKind.REGION_MANIFEST}


@names_damage
def plan(table: Table, options: WhyOptions, context: RunContext | None = None) -> Explanation:
    """Why ``options.target`` is kept or deletable; see :func:`explain`."""
    del context
    return explain(table, options.target, options)


apply = plan


def explain(table: Table, target: str, options: RetentionOptions) -> Explanation:
    """Why a region, a generation, or a file is kept or deletable.

    ``table``: the newest version of it. ``target``: a region id, or the beginning of one (8 characters or more);
    ``region/generation``; a path below the table, or its whole URI. ``options``: as for gc; they set the minimum ages.
    Raises ``InvalidUsageError``: the target is not one of these; ``ObjectNotFoundError``: the target does not exist;
    ``RegionReplacedError``: a generation of a region that is blocked until an operator runs adopt.
    """
    path = _with_whole_id(table, target.removeprefix(table.location.uri).strip("/"))
    region_id, wanted = _wanted(path)
    if path.startswith(f"{version_files.VERSIONS_FOLDER}/"):
        candidates = _version(table, path, options)
    else:
        regions = None if region_id is None else [region_id]
        candidates = [candidate for candidate in gc.candidates(table, options, regions) if wanted(candidate)]
    if not candidates and region_id is not None and region_id in table.regions.region_ids:
        _refuse_missing(table, region_id, path)
    if not candidates:
        if next(iter(table.store.list(path)), None) is None and table.store.head(path) is None:
            raise ObjectNotFoundError(
                f"{target} does not exist in {table.location.uri}.",
                remedy="Give a path below the table, or REGION or REGION/GENERATION, as memwal-ops inspect lists them.",
            )
        candidates = [of_the_base(table, path, _why_in_base(table, path))]
    # A folder within a region is shown object by object.
    whole = region_id is None or path.removeprefix(f"{MEM_WAL_FOLDER}/") == str(region_id)
    return Explanation(target, grouped(candidates, group=whole))


def _with_whole_id(table: Table, path: str) -> str:
    """The path; if it begins with the beginning of a region id, with the whole id."""
    first, slash, rest = path.partition("/")
    region_id = table.regions.by_prefix(first.lower()) if is_id_prefix(first.lower()) else None
    return path if region_id is None else f"{region_id}{slash}{rest}"


def _refuse_missing(table: Table, region_id: UUID, path: str) -> None:
    """Raise ``GenerationMissingError`` if a listed generation has no directory: its rows may be lost."""
    name = path.rsplit("/", 1)[-1]
    manifest = table.region(region_id).latest(checked=True)
    check_identity(table, manifest)
    for listed in manifest.flushed_generations:
        if name in {str(listed.generation), listed.path}:
            raise GenerationMissingError(
                f"Generation {listed.generation} of region {region_id} is listed by the region manifest, but its "
                f"directory {listed.path} is missing.",
                remedy="See runbooks/merge-blocked.md, generation_missing; delete nothing of this region.",
            )


def _wanted(path: str) -> tuple[UUID | None, Callable[[LanceCandidate], bool]]:
    """The region of a path, if any, and which of its candidates the path selects."""
    parts = path.removeprefix(f"{MEM_WAL_FOLDER}/").split("/")
    try:
        region_id = UUID(parts[0])
    except ValueError:
        if not path:
            raise InvalidUsageError(
                "Name a target: a region id, REGION/GENERATION, or a path below the table."
            ) from None
        return None, lambda candidate: covers(candidate, path)
    if len(parts) == 1:
        return region_id, lambda _: True
    if _GENERATION.fullmatch(parts[1]):
        return region_id, lambda candidate: candidate.generation == int(parts[1])
    full = f"{region_folder(region_id)}/{'/'.join(parts[1:])}"
    return region_id, lambda candidate: covers(candidate, full)


def _version(table: Table, path: str, options: RetentionOptions) -> list[LanceCandidate]:
    name = parse_version_manifest_name(path.rsplit("/", 1)[-1])
    if name is None or name.detached:
        return [candidate for candidate in gc.candidates(table, options) if candidate.path == path]
    kept = {entry.version: entry.because for entry in expire.plan(table, expire.ExpireOptions()).kept}
    state = table.store.head(path)
    if state is None:
        return []
    why = kept.get(name.version, "older than 7 d; memwal-ops expire deletes it")
    gate = Gate(met=name.version not in kept, text=why)
    return [LanceCandidate(CandidateKind.BASE, path, state.size, 1, (gate,))]


def _why_in_base(table: Table, path: str) -> str:
    """Why a base file is kept: the versions that refer to it. Reads every manifest."""
    key = version_files.file_key(path)
    if key is None:
        return _OF_THE_BASE
    own = _referring(table.store, version_files.list_manifests(table.store), key)
    versions = sorted(version for path in own if (version := version_files.version_of_main(path)) is not None)
    if not versions:
        others = own + _referring(table.branch.root, version_files.list_manifests_of_others(table.branch), key)
        if not others:
            return "no version refers to it: memwal-ops expire deletes it a week after it was written"
        return f"another branch or a detached version refers to it: {min(others)}"
    if versions[-1] == table.version:
        return "needed by the newest version"
    older = f" and {counted(len(versions) - 1, 'older one')}" if len(versions) > 1 else ""
    return f"needed by version {versions[-1]}{older} (memwal-ops expire)"


def _referring(store: Store, manifests: Iterable[str], key: str) -> list[str]:
    return [path for path, refers in version_files.read_references(store, manifests) if key in refers.all]


def of_the_base(table: Table, path: str, text: str = _OF_THE_BASE) -> LanceCandidate:
    """A path that no collector has candidates for."""
    objects = list(table.store.list(path))
    meta = table.store.head(path) if not objects else None
    size = sum(meta.size for meta in objects) if meta is None else meta.size
    return LanceCandidate(CandidateKind.BASE, path, size, max(1, len(objects)), (Gate(met=False, text=text),))


def grouped(candidates: list[LanceCandidate], *, group: bool) -> tuple[Reason, ...]:
    """One reason per candidate, generations ascending; if ``group``, one for all log entries or manifests alike."""
    kinds = list(dict.fromkeys(candidate.kind for candidate in candidates))
    candidates.sort(
        key=lambda candidate: (str(candidate.region_id or ""), kinds.index(candidate.kind), candidate.generation or 0)
    )
    groups: dict[object, list[LanceCandidate]] = {}
    for at, candidate in enumerate(candidates):
        key: object = at
        if group and candidate.kind in _GROUPED:
            held_by = candidate.why if candidate.verdict is Verdict.HELD else ""
            met = tuple(gate.met for gate in candidate.gates)
            key = (candidate.kind, candidate.region_id, candidate.verdict, met, held_by)
        groups.setdefault(key, []).append(candidate)
    return tuple(Reason(alike[0], len(alike), sum(candidate.bytes for candidate in alike)) for alike in groups.values())
