"""The repair job of Lance tables: :mod:`memwal_ops.core.repair` with the fixes of these tables."""

from __future__ import annotations

from memwal_ops.core.repair import RepairJob
from memwal_ops.formats.lance.jobs import verify
from memwal_ops.formats.lance.jobs.legacy import verify as legacy_verify
from memwal_ops.formats.lance.jobs.repair.choices import CHOICES
from memwal_ops.formats.lance.jobs.repair.fixes import fix_of
from memwal_ops.formats.lance.jobs.repair.legacy import LEGACY_CHOICES, fix_of_legacy
from memwal_ops.formats.lance.jobs.repair.places import place_of

JOB = RepairJob(verify.verified, fix_of, place_of, CHOICES)
LEGACY_JOB = RepairJob(legacy_verify.verified, fix_of_legacy, place_of, LEGACY_CHOICES)
