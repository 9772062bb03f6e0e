"""Shows what a loader yields: a contact sheet of images and volumes, a table of texts."""

from headrace.previewing.batch import Item, Preview, preview
from headrace.previewing.sheet import draw_sheet

__all__ = ["Item", "Preview", "draw_sheet", "preview"]
