"""What /openapi.json says that FastAPI does not see: bodies, which routes read themselves, and how requests fail."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from components.openai.errors import ErrorBody

REF_TEMPLATE: Final = "#/components/schemas/{model}"
EVENTS: Final = {"text/event-stream": {"schema": {"type": "string"}}}  # what an answer may be beside JSON
FASTAPIS: Final = ("HTTPValidationError", "ValidationError")  # in its shape nothing fails here
FAILURES: Final = {"4XX": "The request is refused.", "5XX": "It could not be done."}


def describe(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Make `app` tell of the JSON bodies that its POST routes take, by path, and of failures."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _add_bodies(schema, bodies)
            _add_failures(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_bodies(schema: dict[str, Any], bodies: Mapping[str, type[BaseModel]]) -> None:
    models = [(model, "validation") for model in [*bodies.values(), ErrorBody]]
    refs, definitions = models_json_schema(models, ref_template=REF_TEMPLATE)  # type: ignore[arg-type]
    schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    for path, model in bodies.items():
        content = {"application/json": {"schema": refs[model, "validation"]}}
        schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}


def _add_failures(schema: dict[str, Any]) -> None:
    body = {"schema": {"$ref": REF_TEMPLATE.format(model=ErrorBody.__name__)}}
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for status, text in FAILURES.items():
                operation["responses"][status] = {"description": text, "content": {"application/json": body}}
    for name in FASTAPIS:
        schema["components"]["schemas"].pop(name, None)
