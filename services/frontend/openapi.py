"""/openapi.json: what FastAPI describes, and the POST routes that read their own bodies."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from components.openai.errors import ErrorBody

REF_TEMPLATE: Final = "#/components/schemas/{model}"
EVENTS: Final = {"text/event-stream": {"schema": {"type": "string"}}}
UNUSED_SCHEMAS: Final = ("HTTPValidationError", "ValidationError")  # FastAPI's form of errors
FAILURES: Final = {"4XX": "The request is refused.", "5XX": "It could not be done."}


@dataclass(frozen=True, slots=True)
class PostRoute:
    """A POST route with a JSON body, past FastAPI's dependencies and validation."""

    path: str
    endpoint: Callable[..., Any]  # an ASGI application, or a function of a Request
    body: type[BaseModel]
    answer: type[BaseModel]
    name: str
    description: str
    streams: bool = False

    def operation(self) -> dict[str, Any]:
        """Return its description in OpenAPI, in the form that FastAPI gives to its own."""
        content = {"application/json": {"schema": _reference(self.answer)}, **(EVENTS if self.streams else {})}
        return {
            "summary": self.name.replace("_", " ").title(),
            "description": self.description,
            "operationId": re.sub(r"\W", "_", f"{self.name}{self.path}_post"),
            "requestBody": {"required": True, "content": {"application/json": {"schema": _reference(self.body)}}},
            "responses": {"200": {"description": "Successful Response", "content": content}},
        }


def add_post_routes(app: FastAPI, routes: Sequence[PostRoute]) -> None:
    """Add routes to `app` and to its /openapi.json."""
    for route in routes:
        # Starlette's own route: it calls an ASGI application directly, without FastAPI's dependencies
        app.router.add_route(route.path, route.endpoint, methods=["POST"], name=route.name)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for route in routes:
                schema["paths"].setdefault(route.path, {})["post"] = route.operation()
            _add_models(schema, routes)
            _add_failures(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF_TEMPLATE.format(model=model.__name__)}


def _add_models(schema: dict[str, Any], routes: Sequence[PostRoute]) -> None:
    models = schema.setdefault("components", {}).setdefault("schemas", {})
    # like FastAPI's own: without `"default": null`
    models.update(
        jsonable_encoder(_definitions([route.answer for route in routes], "serialization"), exclude_none=True)
    )
    models.update(_definitions([ErrorBody, *(route.body for route in routes)], "validation"))


def _definitions(models: Sequence[type[BaseModel]], mode: JsonSchemaMode) -> dict[str, Any]:
    _, schema = models_json_schema([(model, mode) for model in models], ref_template=REF_TEMPLATE)
    definitions: dict[str, Any] = schema["$defs"]
    return definitions


def _add_failures(schema: dict[str, Any]) -> None:
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for status, text in FAILURES.items():
                content = {"application/json": {"schema": _reference(ErrorBody)}}
                operation["responses"][status] = {"description": text, "content": content}
    for name in UNUSED_SCHEMAS:
        schema["components"]["schemas"].pop(name, None)
