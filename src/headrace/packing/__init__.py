"""Packs datasets into HDF5 files, and verifies them."""

from headrace.packing.api import pack
from headrace.packing.status import PackStatus, join, pack_status
from headrace.packing.verify import VerifyResult, verify

__all__ = ["PackStatus", "VerifyResult", "join", "pack", "pack_status", "verify"]
