"""The render child of a session: started when it is needed, replaced when it is used up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rag_service.pdf.child_limits import ChildLimits
from rag_service.pdf.child_process import RenderChild

if TYPE_CHECKING:
    from rag_service.config.options import PdfOptions

# A child is replaced between two requests at this share of pdf.child_max_mib, or at this multiple
# of its memory after it opened the file.
_REPLACED_SHARE, _GROWTH = 0.5, 1.5


class ReplacedChild:
    """At most one living child at a time; use it in one task at a time."""

    def __init__(self, limits: PdfOptions) -> None:
        self._limits = limits
        self._child: RenderChild | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the child; None if none was started or it was discarded."""
        return self._child.pid if self._child else None

    async def started(self) -> RenderChild:
        """Return the child; start one if there is none."""
        if self._child is None:
            limits = self._limits
            self._child = await RenderChild.start(
                ChildLimits(
                    max_pixels=limits.max_pixels,
                    jpeg_quality=limits.jpeg_quality,
                    crop_min_pixels=limits.crop_min_pixels,
                    crop_max_side=limits.crop_max_side,
                    raster_cache_mib=limits.raster_cache_mib,
                    trust_hidden_text=limits.trust_hidden_text,
                    max_mib=limits.child_max_mib,
                )
            )
        return self._child

    def discard_before_page(self) -> None:
        """Discard a child that has died, or might find too little memory for the next page."""
        if self._child is not None and (not self._child.alive or self._is_large(self._child)):
            self.discard()

    def discard_before_document(self) -> None:
        """Do the same, and discard a child that has opened many documents."""
        self.discard_before_page()
        if self._child is not None and self._child.documents >= self._limits.child_max_documents:
            self.discard()

    def discard(self) -> None:
        """Kill the child, whatever it does."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def reap(self) -> None:
        """Reap the child if it has ended while it was idle. Safe in a handler of SIGCHLD."""
        if self._child is not None:
            self._child.reap()

    def _is_large(self, child: RenderChild) -> bool:
        """Return True if the next page might find too little of pdf.child_max_mib left.

        A child that was nearly as large with the file just opened gains nothing by a new start.
        """
        most = self._limits.child_max_mib
        return child.mib > max(_REPLACED_SHARE * most, _GROWTH * child.opened_mib)
