// The openai package of npm: chats and, as `stream`, its helper. CommonJS, because only that looks into NODE_PATH.
const OpenAI = require("openai");
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const model = process.env.ASKED_MODEL;
const client = new OpenAI({ baseURL: `${process.env.ASKED_URL}/v1`, apiKey: "none", maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const { ASK, ASK_FOR_PERSON, ASK_FOR_WEATHER, MAX_TOKENS, ROOM, NO_MODEL, TOO_LONG, WEATHER } = JSON.parse(process.env.ASKED);
const common = { model, temperature: 0, max_tokens: MAX_TOKENS };
const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(120) });

async function errorOf(asking, kind) {
  const error = await asking.then(() => null, (refused) => refused);
  if (!(error instanceof kind)) throw error ?? new Error("answered");
  return [error.constructor.name, error.message];
}

async function main() {
  const chats = client.chat.completions;
  const plain = await chats.create({ messages: user(ASK), ...common });
  const stream = chats.stream({ messages: user(ASK), stream_options: { include_usage: true }, ...common });
  const pieces = [];
  for await (const chunk of stream) for (const choice of chunk.choices) if (choice.delta.content) pieces.push(choice.delta.content);
  const streamed = await stream.finalChatCompletion();

  const tools = [{ type: "function", function: { name: "get_weather", description: "Weather of a city", parameters: WEATHER } }];
  const must = { tools, tool_choice: "required", parallel_tool_calls: false };
  const called = (await chats.create({ messages: user(ASK_FOR_WEATHER), ...common, ...must, max_tokens: ROOM })).choices[0].message;
  const results = called.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "sunny" }));
  const after = await chats.create({ messages: [...user(ASK_FOR_WEATHER), called, ...results], tools, tool_choice: "none", ...common });
  const format = zodResponseFormat(Person, "person");
  const parsed = await chats.parse({ messages: user(ASK_FOR_PERSON), response_format: format, ...common, max_tokens: ROOM });

  const told = {
    versions: { "openai (node)": require("openai/version").VERSION, node: process.version },
    answer: plain.choices[0].message.content,
    usage: [plain.usage.prompt_tokens, plain.usage.completion_tokens],
    pieces,
    stream_usage: [streamed.usage.prompt_tokens, streamed.usage.completion_tokens],
    calls: called.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]),
    after_call: after.choices[0].message.content,
    person: parsed.choices[0].message.parsed,
    errors: {
      long: await errorOf(chats.create({ messages: user(TOO_LONG), ...common }), OpenAI.BadRequestError),
      model: await errorOf(chats.create({ messages: user(ASK), ...common, model: NO_MODEL }), OpenAI.NotFoundError),
      embeddings: await errorOf(client.embeddings.create({ model, input: [ASK] }), OpenAI.BadRequestError),
    },
  };
  console.log(JSON.stringify(told));
}

main();
