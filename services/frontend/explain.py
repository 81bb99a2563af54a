"""What `inspect route` asks a frontend: where a text would go now."""

from components.messaging.deadline import now_ms
from components.messaging.service import Endpoint
from components.text.tokenizer import TextModel
from components.wire.routes import ExplainRoute, RouteExplained
from components.wire.sampling import Sampling
from services.frontend.decode_choice import DecodeChoice
from services.frontend.ports import Prompt


def explaining(choice: DecodeChoice, text: TextModel, model: str) -> Endpoint:
    """The call for it; nothing is sent to anyone."""

    async def explain_route(request: ExplainRoute) -> RouteExplained:
        messages = [{"role": "user", "content": request.text}]
        token_ids = await (text.encode_chat(messages) if request.chat else text.encode_text(request.text))
        prompt = Prompt(
            request_id="",
            model=request.adapter or model,
            token_ids=token_ids,
            sampling=Sampling(max_tokens=1),
            cache_salt=request.cache_salt,
            deadline_unix_ms=now_ms(),
            session=request.session,
        )
        return choice.explain(prompt)

    return Endpoint("explain_route", ExplainRoute, explain_route)
