"""`/v1/chat/completions`."""

from collections.abc import Sequence
from functools import partial
from typing import cast

from pydantic import BaseModel
from starlette.types import Scope

from components.openai.chat import CallMade, ChatChoice, ChatCompletion, ChatMessage, ChatRequest
from components.openai.events import Events
from components.openai.fields import FinishReason, parse_body
from components.openai.logprobs import ChatLogprobs, ShownToken
from components.openai.parts import Parts, filled
from components.output.calls import whole_calls
from services.frontend.choice import Piece
from services.frontend.dialects.chunks import chunks
from services.frontend.dialects.conversation_dialect import ConversationDialect
from services.frontend.dialects.dialect import EventStream, logprob_lists, prompt_extras
from services.frontend.generation import Generation
from services.frontend.incoming import Body


class ChatDialect(ConversationDialect):
    route = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    prompt_param = "messages"

    async def read(self, body: Body, scope: Scope) -> ChatRequest:
        self.chat = await body.made_into(partial(parse_body, ChatRequest))
        return self.chat

    def events(self, generation: Generation) -> EventStream:
        request = self.chat
        events = Events.chat(
            self.response_id,
            self.created,
            request.model,
            usage_follows=request.announces_usage,
            empty=self.plan.output is None,
        )
        return chunks(request, events, self.logprobs, generation)

    async def answer(self, choices: Sequence[Piece], generation: Generation) -> Parts:
        token_ids, lists = prompt_extras(self.chat, generation, 0)
        completion = ChatCompletion(
            id=self.response_id,
            created=self.created,
            model=self.chat.model,
            choices=[],
            usage=generation.usage(),
            prompt_token_ids=token_ids,
            prompt_logprobs=[] if lists else None,
        )
        made = (self._choice(i, choice) for i, choice in enumerate(choices))
        return filled(completion, choices=made, **lists)

    def _choice(self, index: int, choice: Piece) -> Parts:
        made = ChatChoice(
            index=index,
            message=message_of(choice),
            logprobs=None if choice.tokens is None else ChatLogprobs.of(()),
            finish_reason=cast("FinishReason", choice.finish),
            token_ids=list(choice.token_ids) if self.chat.return_token_ids else None,
        )
        return filled(made, **logprob_lists(ChatLogprobs, choice))

    def logprobs(self, tokens: Sequence[ShownToken] | None) -> BaseModel | None:
        return None if tokens is None else ChatLogprobs.of(tokens)


def message_of(choice: Piece) -> ChatMessage:
    """The message of a choice. Its content is null if there are only reasoning or calls."""
    return ChatMessage(
        content=choice.text or (None if choice.reasoning or choice.calls else ""),
        reasoning_content=choice.reasoning or None,
        reasoning=choice.reasoning or None,
        tool_calls=[CallMade.of(call) for call in whole_calls(choice.calls)] or None,
    )
