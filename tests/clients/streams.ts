// Runs the clients of the example at once, for test_clients.py.
//
//   node build/streams.js MODE TARGET STREAMS MAX_TOKENS [--ca FILE] [--token-file FILE]
//
// MODE: plain, resume: prints the tokens of each stream; cancel: cancels each after its first message, and prints when the
// server has freed everything; refuse: prints the field at fault.

import { parseArgs } from "node:util";
import { setTimeout } from "node:timers/promises";
import type { ServiceError } from "@grpc/grpc-js";
import { connect, detailsOf } from "./client.js";
import { stream } from "./resume.js";

const { values, positionals } = parseArgs({
  allowPositionals: true, options: { ca: { type: "string" }, "token-file": { type: "string" } },
});
const [mode, target, numStreams, maxTokens] = positionals;
const to = connect(target, { ca: values.ca, tokenFile: values["token-file"] });
let resumes = 0;

function requestOf(index: number) {
  const messages = [{ role: "user", content: `What ${index}` }];
  const sampling = { max_tokens: Number(maxTokens), temperature: 0.9, top_p: 0.95, seed: index, ignore_eos: true };
  return { messages, sampling };
}

async function plain(index: number): Promise<number[]> {
  const ids: number[] = [];
  for await (const response of to.client.chat(requestOf(index), to.metadata)) ids.push(...response.token_ids);
  return ids;
}

async function resumed(index: number): Promise<number[]> {
  const ids: number[] = [];
  for await (const chunk of stream(to, requestOf(index), { onResume: () => resumes++ })) ids.push(...chunk.tokenIds);
  return ids;
}

async function cancelled(index: number): Promise<void> {
  const call = to.client.chat(requestOf(index), to.metadata);
  for await (const _ of call) break; // which destroys the stream, and so cancels the call
}

const indices = [...Array(Number(numStreams)).keys()];
if (mode === "plain" || mode === "resume") {
  const answers = await Promise.all(indices.map(mode === "plain" ? plain : resumed));
  for (const ids of answers) console.log(ids.join(" "));
  console.error(`${resumes} resumes`);
} else if (mode === "cancel") {
  await Promise.all(indices.map(cancelled));
  for (;;) {
    const load = await new Promise<any>((resolve, reject) =>
      to.client.getLoad({}, to.metadata, (error, response) => (error ? reject(error) : resolve(response))));
    if (load.num_running + load.num_waiting === 0) {
      console.log(`${load.num_free_pages} of ${load.num_pages} pages free`);
      break;
    }
    await setTimeout(50);
  }
} else {
  try {
    for await (const _ of stream(to, { ...requestOf(0), sampling: { top_p: 7 } }));
  } catch (error) {
    console.log(`${(error as ServiceError).code} ${detailsOf(error as ServiceError).field}`);
  }
}
to.client.close();
