"""`/v1/completions`: continues texts or token ids."""

from collections.abc import Sequence
from functools import partial
from typing import cast

from starlette.types import Scope

from components.openai.completions import Completion, CompletionChoice, CompletionRequest, check_vocabulary
from components.openai.events import Events
from components.openai.fields import FinishReason, parse_body
from components.openai.logprobs import CompletionLogprobs
from components.openai.parts import Parts, filled
from components.text.tokenizer import TextModel
from services.frontend.choice import TextDelta
from services.frontend.dialects.chat import chunks
from services.frontend.dialects.dialect import (
    Dialect,
    Encoded,
    EventStream,
    logprob_lists,
    prompt_extras,
    whole_choices,
)
from services.frontend.generation import Generation
from services.frontend.incoming import Body


class CompletionDialect(Dialect):
    route = "/v1/completions"
    operation = "text_completion"
    id_prefix = "cmpl-"
    prompt_param = "prompt"
    request: CompletionRequest

    async def read(self, body: Body, scope: Scope) -> CompletionRequest:
        self.request = await body.made_into(partial(parse_body, CompletionRequest))
        return self.request

    def token_limit(self) -> int | None:
        return self.request.token_limit

    async def encode(self, text: TextModel) -> Encoded:
        """Tokenise texts. Token ids are used as they are, if they are in the vocabulary."""
        request = self.request
        prompts: list[list[int]] = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                special = request.add_special_tokens is not False
                prompts.append(await text.encode_text(prompt, add_special_tokens=special))
            else:
                await text.run(len(prompt), partial(check_vocabulary, prompt, text.vocab_size, "prompt"))
                prompts.append(prompt)
        if not request.echo:
            return Encoded(prompts)
        decode = partial(text.decode, skip=request.skip_special_tokens is not False)
        echoes = [
            given if isinstance(given, str) else await text.run(len(given), partial(decode, given))
            for given in request.prompt
        ]
        return Encoded(prompts, echoes)

    def events(self, generation: Generation) -> EventStream:
        request = self.request
        events = Events.completion(self.response_id, self.created, request.model, usage_follows=request.announces_usage)
        return chunks(request, events, CompletionLogprobs, generation)

    async def answer(self, pieces: Sequence[Sequence[TextDelta]], generation: Generation) -> Parts:
        completion = Completion(
            id=self.response_id, created=self.created, model=self.request.model, choices=[], usage=generation.usage()
        )
        choices = enumerate(whole_choices(pieces, self.request))
        return filled(completion, choices=(self._choice(i, choice, generation) for i, choice in choices))

    def _choice(self, index: int, choice: TextDelta, generation: Generation) -> Parts:
        token_ids, lists = prompt_extras(self.request, generation, index)
        made = CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=None if choice.tokens is None else CompletionLogprobs.of(()),
            finish_reason=cast("FinishReason", choice.finish),
            token_ids=list(choice.token_ids) if self.request.return_token_ids else None,
            prompt_token_ids=token_ids,
            prompt_logprobs=[] if lists else None,
        )
        return filled(made, **logprob_lists(CompletionLogprobs, choice), **lists)
