"""What the APIs with conversations share: chat, responses and messages."""

from components.openai.chat import ChatRequest
from components.text.tokenizer import TextModel
from services.frontend.conversation import AnswerPlan, encode_conversation, plan_answer
from services.frontend.dialects.dialect import Dialect, Encoded


class ConversationDialect(Dialect):
    operation = "chat"
    chat: ChatRequest
    plan = AnswerPlan()  # until `encode`

    def token_limit(self) -> int | None:
        return self.chat.token_limit

    async def encode(self, text: TextModel) -> Encoded:
        conversation = self.chat.conversation()
        prompt = await encode_conversation(text, conversation)
        self.plan = await plan_answer(text, conversation, prompt, self.chat.asked_constraint)
        echo = self.chat.messages[-1].text if self.chat.echo else ""
        return Encoded([prompt], [echo], self.plan.output, self.plan.asked)
