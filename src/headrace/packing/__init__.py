"""Packs datasets into HDF5 files, and verifies them."""

from headrace.packing.api import PackPlan, pack
from headrace.packing.parts import PackStatus, join, pack_status
from headrace.packing.verify import VerifyResult, verify

__all__ = ["PackPlan", "PackStatus", "VerifyResult", "join", "pack", "pack_status", "verify"]
