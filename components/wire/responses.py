"""frontend ↔ frontend: stored and running responses."""

from components.wire.codec import Struct, message


@message("response-stored.v1")
class StoredResponse(Struct):
    response: str  # JSON object
    input: str  # JSON list
    earlier: str  # JSON list: earlier responses' items
    owner: bytes  # salt and hash of the API key
    frontend: str = ""  # its subject; "": complete


@message("response-cancel.v1")
class CancelResponse(Struct):
    response_id: str
    ask: bool = False  # only return the state


@message("response-underway.v1")
class ResponseUnderway(Struct):
    # A cancelled response is already stored.
    underway: bool
