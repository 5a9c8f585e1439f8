"""A dependency of routers: refuse query parameters that the route does not have."""

from __future__ import annotations

import difflib

from fastapi import Depends, Request

from rag_service.errors import InvalidOptions


async def _require_known(request: Request) -> None:
    known = sorted(parameter.alias for parameter in request.scope["route"].dependant.query_params)
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Valid: {', '.join(known)}."
            none = "This route takes no query parameters."
            raise InvalidOptions(
                f"Unknown query parameter {name[:80]!r}. {hint if known else none}"
            )


KNOWN_PARAMETERS_ONLY = Depends(_require_known)
