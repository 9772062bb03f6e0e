"""How does a dataset become one file?"""

from headrace.packing.run import pack
from headrace.packing.verify import VerifyResult, verify

__all__ = ["VerifyResult", "pack", "verify"]
