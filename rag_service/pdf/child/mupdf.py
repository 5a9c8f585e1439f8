"""The only module that imports PyMuPDF; import it from the render child alone.

Typed as Any: its hints cover half of it.
"""

from __future__ import annotations

import sys
from typing import Any

# Where PyMuPDF's companions are installed they load a layout model into every process.
for _companion in ("pymupdf.layout", "pymupdf4llm"):
    sys.modules[_companion] = None  # type: ignore[assignment]

import pymupdf as _pymupdf  # noqa: E402
from pymupdf import mupdf as _mupdf  # noqa: E402

pymupdf: Any = _pymupdf
mupdf: Any = _mupdf

# Advice and complaints about broken files do not belong into anybody's log.
pymupdf.no_recommend_layout()
pymupdf.TOOLS.mupdf_display_errors(False)
pymupdf.TOOLS.mupdf_display_warnings(False)
