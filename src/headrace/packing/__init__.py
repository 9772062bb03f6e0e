"""Packs datasets into HDF5 files, and verifies them."""

from headrace.packing.parts import PackStatus, VerifyResult, join, pack_status, verify
from headrace.packing.plan import PackPlan
from headrace.packing.run import pack

__all__ = ["PackPlan", "PackStatus", "VerifyResult", "join", "pack", "pack_status", "verify"]
