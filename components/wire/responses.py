"""frontend ↔ frontend: responses that are kept after they were answered, and those that are still underway."""

from components.wire.codec import Struct, message


@message("response-stored.v1")
class StoredResponse(Struct):
    """A record in JetStream, under the response's id. What is JSON here came from validated requests, or is our own."""

    response: str  # a JSON object, as the client sees it
    input: str  # a JSON list: the items of its own request
    earlier: str  # a JSON list: the items before those, when it goes on from another response
    owner: bytes  # salt and hash of the API key that may see it
    frontend: str = ""  # subject of the frontend that works on it; "": it is over


@message("response-cancel.v1")
class CancelResponse(Struct):
    """On `<frontend subject>.cancel_response`; answered by ResponseUnderway."""

    response_id: str
    ask: bool = False  # only ask whether it is underway


@message("response-underway.v1")
class ResponseUnderway(Struct):
    """What that frontend knows: a response that was cancelled is stored as such by now."""

    underway: bool
