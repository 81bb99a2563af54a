"""frontend ↔ frontend: stored responses, and those in progress."""

from components.wire.codec import Struct, message


@message("response-stored.v1")
class StoredResponse(Struct):
    """A record in JetStream. Its JSON is already validated."""

    response: str  # JSON object
    input: str  # JSON list: items of the request
    earlier: str  # JSON list: items of the responses that it continues
    owner: bytes  # salt and hash of the API key
    frontend: str = ""  # subject of the frontend that generates it; "": it is complete


@message("response-cancel.v1")
class CancelResponse(Struct):
    """On `<frontend subject>.cancel_response`; answered by ResponseUnderway."""

    response_id: str
    ask: bool = False  # do not cancel


@message("response-underway.v1")
class ResponseUnderway(Struct):
    # A cancelled response is already stored as such.
    underway: bool
