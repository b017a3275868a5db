"""Turns other device plugins' configurations into ours, and says what could not be carried over."""

from agent.importing.model import Imported, ImportRefusedError, Remark
from agent.importing.recognition import FORMATS, import_files

__all__ = ["FORMATS", "ImportRefusedError", "Imported", "Remark", "import_files"]
