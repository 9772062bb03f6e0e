"""Collate functions: samples to a batch."""

from headrace.collate.registry import collators
from headrace.collate.sequences import Padded, TextCollator, document_mask, pad_collate
from headrace.collate.stack import Batch, list_collate, stack_collate
from headrace.collate.vision import DetectionCollator, VisionCollator

__all__ = [
    "Batch",
    "DetectionCollator",
    "Padded",
    "TextCollator",
    "VisionCollator",
    "collators",
    "document_mask",
    "list_collate",
    "pad_collate",
    "stack_collate",
]
