"""frontend ↔ frontend: stored responses, and those in progress."""

from components.wire.codec import Struct, message


@message("response-stored.v1")
class StoredResponse(Struct):
    """A record in JetStream, under the response's id. Its JSON comes from validated requests or from us."""

    response: str  # a JSON object, as the client sees it
    input: str  # a JSON list: the items of its own request
    earlier: str  # a JSON list: the items of the responses that it continues
    owner: bytes  # salt and hash of the API key that may see it
    frontend: str = ""  # subject of the frontend that works on it; "": it is over


@message("response-cancel.v1")
class CancelResponse(Struct):
    """On `<frontend subject>.cancel_response`; answered by ResponseUnderway."""

    response_id: str
    ask: bool = False  # only ask whether it is in progress


@message("response-underway.v1")
class ResponseUnderway(Struct):
    """A cancelled response is stored as such by now."""

    underway: bool
