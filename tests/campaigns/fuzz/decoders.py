"""All decoders under fuzzing: each module registers its own when it is imported."""

from __future__ import annotations

from tests.campaigns.fuzz import manifest_decoders, region_decoders, snapshot_decoders, text_decoders
from tests.campaigns.fuzz.decoder import DECODERS

__all__ = ["DECODERS", "manifest_decoders", "region_decoders", "snapshot_decoders", "text_decoders"]
