"""The description of the API, for people at ``/docs`` and for programs at ``/openapi.json``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from det_core.master.api._refusals import ErrorReply

_TEXT = """\
The routes that the Core API's clients use, in their shapes, and some of our own. Names in bodies and queries may be
camelCase or snake_case; 64-bit integers travel as strings. A token goes into `Authorization: Bearer ...`: the user's is
in the file `master/token` of the master's home, and a trial's reaches its own trial only. Whoever logs in by name and
password gives any name, and the user's token as the password.
"""
_REFUSED = {
    "description": "It cannot be done; the body says why.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}},
}
_PLAIN = {
    "description": "It cannot be done; the body says why.",
    "content": {"application/json": {"schema": {"type": "object", "properties": {"message": {"type": "string"}}}}},
}
_STATUSES = ("400", "401", "403", "404", "405", "409", "413", "503")


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of ``app``: what FastAPI finds, with the tokens and the refusals that all routes share."""
    document = get_openapi(title=app.title, version=app.version, description=_TEXT, routes=app.routes)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(_schemas())
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            refused = _REFUSED if path.startswith("/api/") else _PLAIN
            operation["responses"].update(dict.fromkeys(_STATUSES, refused))
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    return document


def _schemas() -> dict[str, Any]:
    schema = ErrorReply.model_json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs", {}), "ErrorReply": schema}
