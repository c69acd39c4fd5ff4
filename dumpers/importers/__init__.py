"""Open what other tools dumped: msprobe, Polygraphy, numpy files, safetensors."""

from align.dumpers.importers.convert import import_dump, open_any
from align.dumpers.importers.detect import detect
from align.dumpers.importers.found import DumpFormat, ImportSummary

__all__ = ["DumpFormat", "ImportSummary", "detect", "import_dump", "open_any"]
