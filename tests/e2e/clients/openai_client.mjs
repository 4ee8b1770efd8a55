// OpenAI's package for JavaScript: answers, streams, calls, responses, vectors and errors.

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "What does os.getcwd do?" }];
const options = { model: "stdlib-chat", temperature: 0, max_tokens: 200 };
const parameters = {
  type: "object",
  properties: { module: { enum: ["os", "json"] } },
  required: ["module"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "look_up", parameters, strict: true } };
const forced = { ...options, messages, tools: [tool], tool_choice: { type: "function", function: { name: "look_up" } } };

const whole = await client.chat.completions.create({ ...options, messages, stop: ["unicode"] });
assert.equal(whole.choices[0].finish_reason, "stop");
let text = "";
let usage = null;
const chunks = await client.chat.completions.create({
  ...options, messages, stop: ["unicode"], stream: true, stream_options: { include_usage: true },
});
for await (const chunk of chunks) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const called = (await client.chat.completions.create(forced)).choices[0];
assert.equal(called.finish_reason, "tool_calls");
const [call] = called.message.tool_calls;
assert.ok(["os", "json"].includes(JSON.parse(call.function.arguments).module));
const streamed = await client.chat.completions.stream(forced).finalChatCompletion();
assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
const looked = [];
const runner = client.chat.completions.runTools({
  ...options,
  messages,
  tools: [{ type: "function", function: { ...tool.function, parse: JSON.parse, function: (found) => looked.push(found) } }],
  tool_choice: forced.tool_choice,
});
await runner.done();
assert.deepEqual(looked[0], JSON.parse(call.function.arguments));

const schema = { type: "json_schema", json_schema: { name: "found", schema: parameters, strict: true } };
const parsed = await client.chat.completions.parse({ ...options, messages, response_format: schema });
assert.ok(["os", "json"].includes(parsed.choices[0].message.parsed.module));

const asked = { model: options.model, input: messages[0].content, temperature: 0, max_output_tokens: 200 };
const response = await client.responses.create(asked);
const kinds = [];
const events = client.responses.stream(asked).on("event", (event) => kinds.push(event.type));
assert.equal((await events.finalResponse()).output_text, response.output_text);
assert.equal(kinds[0], "response.created");
assert.equal(kinds.at(-1), "response.completed");

// The package asks for base64 and decodes it.
const vectors = await client.embeddings.create({ model: options.model, input: ["Hi", "you"] });
assert.equal(vectors.data.length, 2);
assert.ok(Math.abs(vectors.data[0].embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-3);
assert.ok((await client.models.list()).data.some((model) => model.id === options.model));
assert.equal((await client.moderations.create({ input: "Hi" })).results[0].flagged, false);

await assert.rejects(client.chat.completions.create({ ...options, model: "none", messages }), (error) => {
  assert.ok(error instanceof OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
  return error.requestID !== null;
});
await assert.rejects(client.chat.completions.create({ ...options, messages, temperature: 9 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  return error.param === "temperature";
});
const cut = await client.chat.completions.create({ ...options, messages, stream: true });
for await (const _ of cut) break;
