"""Collate functions: samples to a batch."""

from headrace.collate.pad import Padded, pad_collate
from headrace.collate.registry import collators
from headrace.collate.stack import Batch, list_collate, stack_collate
from headrace.collate.text import TextCollator, document_mask
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
