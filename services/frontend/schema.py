"""Request bodies in /openapi.json: the generating routes read their bodies themselves, so FastAPI does not see them."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF_TEMPLATE = "#/components/schemas/{model}"


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Make `app` tell of the JSON bodies that its POST routes take, by path."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _add_bodies(schema, bodies)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_bodies(schema: dict[str, Any], bodies: Mapping[str, type[BaseModel]]) -> None:
    models = [(model, "validation") for model in bodies.values()]
    refs, definitions = models_json_schema(models, ref_template=REF_TEMPLATE)  # type: ignore[arg-type]
    schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    for path, model in bodies.items():
        content = {"application/json": {"schema": refs[model, "validation"]}}
        schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
