"""Shows what a loader yields: a contact sheet of images and volumes, a table of texts."""

from headrace.previewing.batch import Item, Preview, preview
from headrace.previewing.sheet import draw_sheet
from headrace.previewing.table import table_lines

__all__ = ["Item", "Preview", "draw_sheet", "preview", "table_lines"]
