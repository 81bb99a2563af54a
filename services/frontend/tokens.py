"""`/tokenize` and `/detokenize`."""

from components.openai.completions import check_vocabulary
from components.openai.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from services.frontend.conversation import encode_conversation
from services.frontend.one_piece import Call
from services.frontend.ports import ServedModel
from services.frontend.prompts import find_model


async def tokenize(call: Call, request: TokenizeRequest) -> bytes:
    """What a prompt or a conversation becomes. Raises: MeshError."""
    request.check()
    text, model = call.frontend.text, _model(call, request.model)
    if request.prompt is not None:
        tokens = await text.encode_text(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    else:
        tokens = await encode_conversation(text, request.conversation())
    names = text.names(tokens) if request.return_token_strs else None
    answer = Tokenized(count=len(tokens), max_model_len=model.max_context, tokens=tokens, token_strs=names)
    return answer.model_dump_json().encode()


async def detokenize(call: Call, request: DetokenizeRequest) -> bytes:
    """The text of token ids. Raises: MeshError."""
    _model(call, request.model)
    check_vocabulary(request.tokens, call.frontend.text.vocab_size, "tokens")
    text = call.frontend.text.decode(request.tokens, skip=False)
    return Detokenized(prompt=text).model_dump_json().encode()


def _model(call: Call, name: str | None) -> ServedModel:
    """The one that is named, else the one that everybody here tokenizes for. Raises: UnknownModel, NoDecodeInstance."""
    mesh = call.frontend.mesh
    model = find_model(mesh, name if name is not None else next((model.name for model in mesh.models()), ""))
    call.model = model.name
    return model
