"""Packs datasets into HDF5 files, and verifies them."""

from headrace.packing.run import pack
from headrace.packing.verify import VerifyResult, verify

__all__ = ["VerifyResult", "pack", "verify"]
