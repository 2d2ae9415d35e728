// Node's openai package: chats, streams, parsed answers, tools in a loop of two calls, log-probabilities, embeddings,
// responses, and files and batches.
//
//     node openai_client.mjs URL_OF_CHATS URL_OF_EMBEDDINGS
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, embeddingsUrl] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Who art thou?" }];
const budget = { thinking_token_budget: 4 };
const Play = z.object({ king: z.string().max(12), acts: z.union([z.literal(4), z.literal(5)]) });

async function chat() {
  const options = { model: "thinker", messages, max_tokens: 40, temperature: 0 };
  const whole = await client.chat.completions.create(options);
  const stream = await client.chat.completions.create({
    ...options, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content ?? "");
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  const helper = client.chat.completions.stream(options);
  const final = await helper.finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
}

async function logprobs() {
  const found = await client.chat.completions.create({
    model: "thinker", messages, max_tokens: 4, temperature: 0, logprobs: true, top_logprobs: 2,
  });
  const positions = found.choices[0].logprobs.content;
  assert.equal(positions.length, found.usage.completion_tokens);
  for (const position of positions) {
    assert.equal(position.top_logprobs.length, 2);
    assert.equal(position.logprob, position.top_logprobs[0].logprob);
  }
}

async function parsed() {
  const options = { model: "thinker", messages, max_tokens: 300, seed: 1, ...budget };
  const response_format = zodResponseFormat(Play, "play");
  const done = await client.chat.completions.parse({ ...options, response_format });
  assert.ok([4, 5].includes(done.choices[0].message.parsed.acts));
  const streamed = await client.chat.completions.stream({ ...options, response_format }).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, done.choices[0].message.parsed);
}

async function tools() {
  const City = z.object({ city: z.enum(["Paris", "Rome"]) });
  const weather = zodFunction({ name: "get_weather", parameters: City });
  const options = { model: "thinker", max_tokens: 200, seed: 1, tools: [weather], ...budget };
  const asked = await client.chat.completions.parse({ ...options, messages, tool_choice: "required" });
  const [call] = asked.choices[0].message.tool_calls;
  assert.ok(["Paris", "Rome"].includes(call.function.parsed_arguments.city));
  const result = { role: "tool", tool_call_id: call.id, content: "15 degrees" };
  const turns = [...messages, asked.choices[0].message, result];
  const again = await client.chat.completions.create({ ...options, messages: turns });
  assert.ok(again.usage.prompt_tokens > asked.usage.prompt_tokens);
  // The same loop, run by the client.
  let cities = [];
  const runner = client.chat.completions.runTools(
    {
      ...options, messages, tool_choice: { type: "function", function: { name: "get_weather" } },
      tools: [
        {
          type: "function",
          function: {
            name: "get_weather", parameters: weather.function.parameters, parse: JSON.parse,
            function: async ({ city }) => (cities.push(city), "15 degrees"),
          },
        },
      ],
    },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.ok(cities.length > 0);
}

async function embeddings() {
  const embedder = new OpenAI({ baseURL: embeddingsUrl, apiKey: "none", maxRetries: 0 });
  const input = ["The sea", "a king"];
  const byDefault = await embedder.embeddings.create({ model: "embedder", input }); // the client asks for base64
  const asFloats = await embedder.embeddings.create({ model: "embedder", input, encoding_format: "float" });
  const asBase64 = await embedder.embeddings.create({ model: "embedder", input, encoding_format: "base64" });
  for (const index of [0, 1]) {
    const floats = asFloats.data[index].embedding;
    const bytes = Buffer.from(asBase64.data[index].embedding, "base64");
    const decoded = new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
    assert.equal(decoded.length, floats.length);
    floats.forEach((value, place) => {
      assert.ok(Math.abs(value - decoded[place]) < 1e-6);
      assert.ok(Math.abs(value - byDefault.data[index].embedding[place]) < 1e-6);
    });
  }
}

async function responses() {
  const options = { model: "thinker", input: "Who art thou?", max_output_tokens: 40, temperature: 0, store: false };
  const whole = await client.responses.create(options);
  let text = "", last = "";
  for await (const event of await client.responses.create({ ...options, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event.type;
  }
  assert.equal(text, whole.output_text);
  assert.equal(last, `response.${whole.status}`);
  const done = await client.responses.parse({
    model: "thinker", input: "Who art thou?", max_output_tokens: 300, store: false, ...budget,
    text: { format: zodTextFormat(Play, "play") },
  });
  assert.ok([4, 5].includes(done.output_parsed.acts));
}

async function batches() {
  const body = { prompt: "Who", max_tokens: 4, temperature: 0 };
  const lines = [0, 1, 2].map((each) => ({ custom_id: `${each}`, method: "POST", url: "/v1/completions", body }));
  const text = lines.map((line) => JSON.stringify(line)).join("\n") + "\n{\n";
  const file = await client.files.create({ file: await toFile(Buffer.from(text), "in.jsonl"), purpose: "batch" });
  let batch = await client.batches.create({
    input_file_id: file.id, endpoint: "/v1/completions", completion_window: "24h",
  });
  while (!["completed", "failed", "expired"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.deepEqual(batch.request_counts, { total: 4, completed: 3, failed: 1 });
  const found = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map(JSON.parse);
  assert.equal(new Set(found.map((answer) => answer.response.body.choices[0].text)).size, 1);
  assert.deepEqual(found.map((answer) => answer.custom_id).sort(), ["0", "1", "2"]);
  await client.files.delete(file.id);
}

async function errors() {
  await assert.rejects(client.chat.completions.create({ model: "gpt-5", messages }), OpenAI.NotFoundError);
  await assert.rejects(
    client.chat.completions.create({ model: "thinker", messages, temprature: 1 }), OpenAI.BadRequestError,
  );
  assert.deepEqual((await client.models.list()).data.map((model) => model.id), ["org/thinker"]);
}

for (const check of [chat, logprobs, parsed, tools, embeddings, responses, batches, errors]) {
  await check();
  console.log(`passed: ${check.name}`);
}
