"""The page /docs: all operations on one page that loads nothing from other servers.

Machines of customers are offline, and the usual viewers load their scripts from a CDN.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse

router = APIRouter(include_in_schema=False)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
h2 { border-top: 1px solid #ccc; margin-top: 2rem; padding-top: 1rem; font-size: 1.1rem }
h2 b { display: inline-block; min-width: 4.5rem }
table { border-collapse: collapse; margin: .5rem 0 }
td, th { border: 1px solid #ddd; padding: .2rem .6rem; text-align: left; vertical-align: top }
code { background: #f4f4f4; padding: 0 .2rem }
"""
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(_page(request.app), headers=_HEADERS)


@router.get("/")
async def root() -> RedirectResponse:
    """Redirect the bare address to /docs."""
    return RedirectResponse("/docs")


@cache
def _page(app: FastAPI) -> str:
    description = app.openapi()
    title = escape(description["info"]["title"])
    body = "\n".join(
        _operation(method, path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title} {escape(description['info']['version'])}</h1>"
        f"<p>{_prose(description['info'].get('description', ''))}</p>"
        '<p>The machine-readable description is <a href="/openapi.json">openapi.json</a>.</p>'
        f"{body}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    head = f"<h2><b>{method.upper()}</b> <code>{escape(path)}</code> "
    parts = [
        head + f"{escape(operation.get('summary', ''))}</h2>",
        f"<p>{_prose(operation.get('description', ''))}</p>",
        _table("Parameters", _parameters(operation)),
        _table("Body", _fields(operation)),
        _table("Answers", _answers(operation)),
    ]
    return "\n".join(part for part in parts if part)


def _parameters(operation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for parameter in operation.get("parameters", []):
        yield f"{parameter['name']} ({parameter['in']})", parameter.get("description", "")


def _fields(operation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    content = operation.get("requestBody", {}).get("content", {})
    for kind, form in content.items():
        fields = form["schema"].get("properties", {})
        yield kind, ", ".join(fields) or form["schema"].get("$ref", "").rpartition("/")[2]


def _answers(operation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for status, response in operation["responses"].items():
        content = response.get("content", {})
        codes = [code for kind in content.values() for code in kind.get("examples", {})]
        yield status, ", ".join(codes) or response.get("description", "")


def _table(title: str, rows: Iterator[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{_prose(text)}</td></tr>"
        for name, text in rows
    )
    return f"<table><tr><th colspan=2>{title}</th></tr>{cells}</table>" if cells else ""


def _prose(text: str) -> str:
    """Return the text as HTML, with `…` as code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))
