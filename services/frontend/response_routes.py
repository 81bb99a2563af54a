"""`/v1/responses/{id}`: stored responses can be read, cancelled and deleted."""

import json
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from components.errors import Rejected, UnknownResponse
from components.openai.responses import ResponseObject
from components.wire.responses import StoredResponse
from services.frontend.gate import caller_of
from services.frontend.stored import StoredResponses

MAX_PAGE_ITEMS: Final = 100
_ID_PREFIXES: Final = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}


def add_response_routes(app: FastAPI, stored: StoredResponses | None) -> None:
    @app.get("/v1/responses/{response_id}", response_model=ResponseObject)
    async def retrieve(response_id: str, request: Request) -> Response:
        """Read a response; one in the background may be `in_progress`."""
        _only(request)
        return _response_of(await _at_hand(stored, response_id).get(response_id, _key(request)))

    @app.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject)
    async def cancel(response_id: str, request: Request) -> Response:
        """Cancel a response in the background."""
        return _response_of(await _at_hand(stored, response_id).cancel(response_id, _key(request)))

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> dict[str, str | bool]:
        """Delete a response; one in the background is cancelled."""
        await _at_hand(stored, response_id).delete(response_id, _key(request))
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_ITEMS)] = 20,
        order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List the items of the response's own request, without those of earlier responses; by default the last first."""
        _only(request, "limit", "order", "after")
        record = await _at_hand(stored, response_id).get(response_id, _key(request))
        return _page(_items(response_id, record), limit, order, after)


def _at_hand(stored: StoredResponses | None, response_id: str) -> StoredResponses:
    if stored is None:
        raise UnknownResponse(f"Response with id '{response_id[:128]}' not found: this server stores no responses.")
    return stored


def _key(request: Request) -> bytes:
    return caller_of(request.scope).owner


def _only(request: Request, *known: str) -> None:
    """Raises: Rejected, for a parameter in the URL that would be ignored. Stored responses cannot be streamed."""
    for name, value in request.query_params.multi_items():
        if name in {*known, "include_obfuscation"} or (name, value) == ("stream", "false"):
            continue
        raise Rejected(
            f"'{name[:128]}' has a value that this server does not support: leave it out.",
            param=name[:128],
            code="unsupported_parameter",
        )


def _response_of(record: StoredResponse) -> Response:
    return Response(record.response, media_type="application/json")


def _items(response_id: str, record: StoredResponse) -> list[dict[str, Any]]:
    """Items, each with an id and a status, also if the client gave none."""
    own = response_id.removeprefix("resp_")
    items = {}
    for i, item in enumerate(json.loads(record.input)):
        made = f"{_ID_PREFIXES[item['type']]}{own}in{i:02d}"
        shown = item.get("id", made)
        shown = made if shown in items else shown  # a client may send an id twice, and pages continue after an id
        items[shown] = {"status": "completed", **item, "id": shown}
    return list(items.values())


def _page(items: list[dict[str, Any]], limit: int, order: str, after: str | None) -> dict[str, Any]:
    if order == "desc":
        items.reverse()
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise Rejected(f"Invalid 'after': there is no item '{after[:128]}'.", param="after", code="invalid_value")
        items = items[at + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > limit}
