"""Packs datasets into HDF5 files, and verifies them."""

from headrace.packing.parts import PackStatus, join, pack_status
from headrace.packing.run import PackPlan, pack
from headrace.packing.verify import VerifyResult, verify

__all__ = ["PackPlan", "PackStatus", "VerifyResult", "join", "pack", "pack_status", "verify"]
