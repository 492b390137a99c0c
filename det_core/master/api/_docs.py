"""The description of the API as a page, which needs nothing from elsewhere: no script, no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .2rem 0; } code, pre { font: 13px/1.4 ui-monospace, monospace; }
pre { background: #f4f4f4; padding: .6rem; overflow: auto; } b { display: inline-block; min-width: 4.5rem; }
details { border-bottom: 1px solid #ddd; } details > div { padding-left: 5rem; }
"""


def page(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as HTML."""
    title, info = escape(document["info"]["title"]), document["info"]
    return "".join(
        [
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
            f"<h1>{title} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
            '<p>For programs: <a href="openapi.json">openapi.json</a></p>',
            *_sections(document),
        ]
    )


def _sections(document: Mapping[str, Any]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found.setdefault(operation["tags"][0], []).append(_operation(method, path, operation, document))
    for tag, parts in found.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(parts)}"


def _operation(method: str, path: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {})
    reply = operation["responses"]["200"].get("content", {})
    parts = [f"<p>{escape(operation.get('description', ''))}</p>"]
    if parameters := [p for p in operation.get("parameters", ()) if p["in"] == "query"]:
        names = ", ".join(f"<code>{escape(p['name'])}</code>" for p in parameters)
        parts.append(f"<p>In the query: {names}</p>")
    parts += [f"<p>Body:</p>{_schema(kind, document)}" for kind in body.values()]
    parts += [f"<p>Answer:</p>{_schema(kind, document)}" for kind in reply.values()]
    head = f"<b>{method.upper()}</b> <code>{escape(path)}</code>"
    return f"<details><summary>{head}</summary><div>{''.join(parts)}</div></details>"


def _schema(content: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    example = _example(content.get("schema", {}), document["components"]["schemas"], 0)
    return f"<pre>{escape(json.dumps(example, indent=2))}</pre>"


def _example(schema: Mapping[str, Any], parts: Mapping[str, Any], depth: int) -> Any:
    """The form of what a schema describes: the names of its fields, and the type of each."""
    if depth > 8:
        return "..."
    if "$ref" in schema:
        return _example(parts[schema["$ref"].rsplit("/", 1)[1]], parts, depth)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            known = [s for s in schema[several] if s.get("type") != "null"]
            forms = [_example(s, parts, depth + 1) for s in known]
            return forms[0] if len(forms) == 1 else " or ".join(f if isinstance(f, str) else "object" for f in forms)
    if "properties" in schema:
        return {name: _example(value, parts, depth + 1) for name, value in schema["properties"].items()}
    if schema.get("type") == "array":
        return [_example(schema.get("items", {}), parts, depth + 1)]
    return schema.get("format") or schema.get("type", "anything")
