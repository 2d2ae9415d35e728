// Streams a chat that survives the restart of a replica, cancels one, and shows a refused field.
//
//   node build/chat.js TARGET [--ca FILE] [--token-file FILE] [MESSAGE]

import { parseArgs } from "node:util";
import type { ServiceError } from "@grpc/grpc-js";
import { connect, detailsOf } from "./client.js";
import { stream } from "./resume.js";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { ca: { type: "string" }, "token-file": { type: "string" }, "max-tokens": { type: "string", default: "200" } },
});
const [target = "127.0.0.1:50051", content = "Who art thou?"] = positionals;
const to = connect(target, { ca: values.ca, tokenFile: values["token-file"] });
const messages = [{ role: "user", content }];

console.log("# A chat. Restart a replica meanwhile: it goes on where it was.");
const request = { messages, sampling: { max_tokens: Number(values["max-tokens"]) } };
const onResume = (error: ServiceError) => console.error(`\n[resuming after: ${error.message}]`);
for await (const chunk of stream(to, request, { onResume, deadline: new Date(Date.now() + 600_000) })) {
  process.stdout.write(chunk.text);
  if (chunk.finish) console.log(`\n[${chunk.finish}]`);
}

console.log("# Another one, cancelled after its first message: the server frees its pages at once.");
for await (const chunk of stream(to, request)) {
  console.log(`${chunk.text}...`);
  break; // or call.cancel(), or an AbortSignal from elsewhere
}

console.log("# A refused one.");
try {
  for await (const _ of stream(to, { messages, sampling: { temperature: -1 } }));
} catch (error) {
  console.log(`field ${detailsOf(error as ServiceError).field}: ${(error as ServiceError).details}`);
}
to.client.close();
