"""What tells of tokens alone: `/tokenize`, `/detokenize`, and how long a message's prompt would be."""

from components.anthropic.messages import CountRequest, TokenCountAnswer
from components.openai.completions import check_vocabulary
from components.openai.parts import Parts, filled, items_of, text_filled
from components.openai.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from services.frontend.conversation import encode_conversation
from services.frontend.messages import MessagesDialect
from services.frontend.one_piece import Call
from services.frontend.ports import ServedModel
from services.frontend.prompts import find_model


async def tokenize(call: Call, request: TokenizeRequest) -> Parts:
    """What a prompt or a conversation becomes. Raises: MeshError."""
    request.check()
    text, model = call.frontend.text, _model(call, request.model)
    if request.prompt is not None:
        tokens = await text.encode_text(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    else:
        tokens = await encode_conversation(text, request.conversation())
    answer = Tokenized(count=len(tokens), max_model_len=model.max_context, tokens=[])
    if not request.return_token_strs:
        return filled(answer, tokens=items_of(tokens))
    both = answer.model_copy(update={"token_strs": []})
    return filled(both, tokens=items_of(tokens), token_strs=items_of(tokens, text.names))


async def detokenize(call: Call, request: DetokenizeRequest) -> Parts:
    """The text of token ids. Raises: MeshError."""
    _model(call, request.model)
    text, tokens = call.frontend.text, request.tokens

    def decoded() -> str:
        check_vocabulary(tokens, text.vocab_size, "tokens")
        return text.decode(tokens, skip=False)

    return text_filled(Detokenized(prompt=""), await text.run(len(tokens), decoded))


async def count(call: Call, request: CountRequest) -> Parts:
    """How long the prompt of a message would be. Raises: MeshError."""
    dialect = MessagesDialect(call.id)
    call.refusal = dialect.refusal
    dialect.take(request)
    _model(call, request.model)
    [prompt] = await dialect.encode(call.frontend.text)
    return filled(TokenCountAnswer(input_tokens=len(prompt)))


def _model(call: Call, name: str | None) -> ServedModel:
    """The one that is named, else the one that everybody here tokenizes for. Raises: UnknownModel, NoDecodeInstance."""
    mesh = call.frontend.mesh
    model = find_model(mesh, name if name is not None else next((model.name for model in mesh.models()), ""))
    call.model = model.name
    return model
