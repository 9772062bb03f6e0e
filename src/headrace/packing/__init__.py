"""Packs datasets into HDF5 files and Zarr groups, and verifies them."""

from headrace.packing.api import pack
from headrace.packing.dry_run.plan import PackPlan
from headrace.packing.status import PackStatus, join, pack_status
from headrace.packing.verify import VerifyResult, verify

__all__ = ["PackPlan", "PackStatus", "VerifyResult", "join", "pack", "pack_status", "verify"]
