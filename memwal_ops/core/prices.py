"""What requests and stored bytes cost: list prices of stores, and the money of a run (:func:`money_of`).

List prices are those without discounts, in USD, of the source and date that each names. They differ by region and by
contract: ``prices`` in a configuration replaces any of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.storage.metering import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

CURRENCY = "USD"
_GIB = 1 << 30
_REQUESTS = 1000
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of one store.

    Attributes:
        get: of 1,000 GET and HEAD requests.
        put: of 1,000 PUT and COPY requests, and parts of uploads.
        list: of 1,000 LIST requests.
        delete: of 1,000 DELETE requests.
        read: of a GiB that is read; a reader in the same region mostly pays nothing.
        written: of a GiB that is written.
        stored: of a GiB that is stored for a month.
        cpu: of an hour of one core of the machine that runs the jobs.
        date: when the source had these prices.
        source: where they are from.
    """

    get: float = 0.0
    put: float = 0.0
    list: float = 0.0
    delete: float = 0.0
    read: float = 0.0
    written: float = 0.0
    stored: float = 0.0
    cpu: float = 0.0
    date: str = ""
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """The entry of ``prices``."""
        return asdict(self)


LIST_PRICES: Mapping[str, Prices] = {
    "s3": Prices(
        get=0.0004,
        put=0.005,
        list=0.005,
        stored=0.023,
        date="2025-01",
        source="https://aws.amazon.com/s3/pricing/ (S3 Standard, us-east-1)",
    ),
    "gcs": Prices(
        get=0.0004,
        put=0.005,
        list=0.005,
        stored=0.020,
        date="2025-01",
        source="https://cloud.google.com/storage/pricing (Standard, us-central1)",
    ),
    "azure": Prices(
        get=0.0004,
        put=0.005,
        list=0.005,
        stored=0.018,
        date="2025-01",
        source="https://azure.microsoft.com/pricing/details/storage/blobs/ (Hot, LRS, East US)",
    ),
    "local": Prices(),
}
"""By the store that a run's ``used`` names."""


def money_of(used: Mapping[str, Any], prices: Mapping[str, Prices]) -> float:
    """What a run cost."""
    price = prices.get(str(used.get("store")), Prices())
    requests = used.get("requests") or {}
    asked = sum(float(requests.get(kind, 0)) * float(getattr(price, kind)) for kind in KINDS) / _REQUESTS
    moved = float(used.get("bytes_read") or 0) * price.read + float(used.get("bytes_written") or 0) * price.written
    return asked + moved / _GIB + float(used.get("cpu_seconds") or 0) / _HOUR * price.cpu


def monthly_storage(size: float, store: str, prices: Mapping[str, Prices]) -> float:
    """What so many bytes cost in a month."""
    return size / _GIB * prices.get(store, Prices()).stored


def money_text(amount: float, currency: str = CURRENCY) -> str:
    """An amount with two decimals, or with two digits if it is less: ``$1.20``, ``$0.0042``, ``0.50 EUR``."""
    digits = f"{amount:,.2f}" if amount >= 0.01 or not amount else f"{amount:.2g}"  # noqa: PLR2004 - a cent
    if "e" in digits:
        digits = "0.00"
    return f"${digits}" if currency == CURRENCY else f"{digits} {currency}"
