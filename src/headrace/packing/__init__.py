"""Packs datasets into HDF5 files, and verifies them."""

from headrace.packing.api import pack
from headrace.packing.dry_run import PackPlan
from headrace.packing.status import PackStatus, join, pack_status
from headrace.packing.verify import VerifyResult, verify

__all__ = ["PackPlan", "PackStatus", "VerifyResult", "join", "pack", "pack_status", "verify"]
