// Streams that survive the restart of a replica: no token is lost, and none is repeated.
//
// A token depends only on the prompt, the seed and its position. After an interruption, the prompt and the tokens received
// so far are therefore sent as a new prompt with the same seed, to any replica of the same model.

import { randomBytes } from "node:crypto";
import { setTimeout } from "node:timers/promises";
import { status, type ServiceError } from "@grpc/grpc-js";
import { detailsOf, type Connection } from "./client.js";
import type { ChatRequest } from "./gen/meshserve/v1/ChatRequest.js";
import type { GenerateRequest } from "./gen/meshserve/v1/GenerateRequest.js";
import type { GenerateResponse__Output } from "./gen/meshserve/v1/GenerateResponse.js";
import type { SamplingParams } from "./gen/meshserve/v1/SamplingParams.js";

const RETRIED = new Set([status.UNAVAILABLE, status.RESOURCE_EXHAUSTED, status.CANCELLED]);
const FIRST_DELAY_SECONDS = 0.05;
const MAX_DELAY_SECONDS = 2;

export interface Chunk {
  text: string;
  tokenIds: number[];
  finish?: string; // reason, in the last chunk only
}

export interface ResumeOptions {
  maxFailures?: number; // attempts in a row that may fail without a new token
  deadline?: Date; // of the whole stream
  signal?: AbortSignal; // cancels it
  onResume?: (error: ServiceError) => void; // told before each further attempt
}

type Request = ChatRequest | GenerateRequest;

/** Streams a request of one sample, and resumes it wherever it is interrupted. Throws the error of the last attempt. */
export async function* stream(to: Connection, request: Request, options: ResumeOptions = {}): AsyncGenerator<Chunk> {
  const { maxFailures = 20, deadline, signal, onResume } = options;
  const callOptions = deadline ? { deadline } : {};
  const sampling: SamplingParams = { ...request.sampling };
  sampling.seed ??= (randomBytes(8).readBigUInt64BE() >> 1n).toString();
  let prompt: number[] | undefined;
  let limit: number | undefined; // tokens that can still come at most, counted from the first attempt
  const received: number[] = [];
  for (let failures = 0, attempt = 0; ; attempt++) {
    try {
      if (prompt === undefined) {
        if (sampling.max_tokens == null) {
          const info = await modelInfo(to, callOptions, signal);
          sampling.max_tokens = info?.default_sampling?.max_tokens || undefined;
          limit = info?.max_context_tokens;
        }
        prompt = await tokensOf(to, request, callOptions, signal);
        limit = sampling.max_tokens ?? (limit && limit - prompt.length);
      }
      for await (const response of generate(to, next(request, sampling, prompt, received, attempt), callOptions, signal)) {
        received.push(...response.token_ids); // before the text is used, so that both always agree
        failures = 0;
        if (response.adapter_digest) request = { ...request, adapter_digest: response.adapter_digest }; // the same files
        if (response.finish?.reason === "FINISH_REASON_ERROR") throw new Error(response.finish.message);
        yield { text: response.text, tokenIds: response.token_ids, finish: response.finish?.reason };
        if (response.finish) return;
      }
      throw new Error("the stream ended before its last message");
    } catch (error) {
      const failure = error as ServiceError;
      const seconds = detailsOf(failure).retrySeconds;
      const isHopeless = failure.code === status.RESOURCE_EXHAUSTED && seconds === undefined;
      if (signal?.aborted || !RETRIED.has(failure.code) || isHopeless || failures >= maxFailures) throw error;
      const backoff = Math.min(FIRST_DELAY_SECONDS * 2 ** failures, MAX_DELAY_SECONDS) * (0.5 + Math.random() / 2);
      failures++;
      onResume?.(failure);
      const delay = 1000 * Math.max(backoff, seconds ?? 0);
      await setTimeout(deadline ? Math.min(delay, Math.max(0, deadline.getTime() - Date.now())) : delay);
    }
    if (limit !== undefined && prompt !== undefined && received.length >= limit) {
      yield { text: "", tokenIds: [], finish: "FINISH_REASON_LENGTH" }; // only the last message was lost
      return;
    }
  }
}

/** The description of the model; undefined if the token does not permit it. */
async function modelInfo(to: Connection, callOptions: object, signal?: AbortSignal) {
  try {
    return await unary(to.client.getModelInfo.bind(to.client), {}, to, callOptions, signal);
  } catch (error) {
    if ((error as ServiceError).code !== status.PERMISSION_DENIED) throw error;
  }
}

/** The request of the next attempt. */
function next(
  request: Request, sampling: SamplingParams, prompt: number[], received: number[], attempt: number,
): GenerateRequest {
  const ids = [...prompt, ...received];
  const resumed: SamplingParams = { ...sampling, num_resumed_tokens: (sampling.num_resumed_tokens ?? 0) + received.length };
  if (sampling.max_tokens != null) resumed.max_tokens = sampling.max_tokens - received.length;
  if (received.length) delete resumed.prompt_logprobs; // they came before the first token
  const made: GenerateRequest = { token_ids: { token_ids: ids }, sampling: resumed };
  if (request.priority != null) made.priority = request.priority;
  if (request.cache_salt != null) made.cache_salt = request.cache_salt;
  if (request.adapter != null) made.adapter = request.adapter;
  if (request.adapter_digest != null) made.adapter_digest = request.adapter_digest;
  // The previous id may still be in use on a server that has not noticed the disconnect.
  if (request.request_id != null) made.request_id = request.request_id.slice(0, 120) + (attempt ? `~${attempt}` : "");
  return made;
}

async function tokensOf(to: Connection, request: Request, callOptions: object, signal?: AbortSignal): Promise<number[]> {
  if ("token_ids" in request && request.token_ids) return request.token_ids.token_ids ?? [];
  const { messages, enable_thinking, tools, add_generation_prompt, continue_last_message } = request as ChatRequest;
  const asked = messages
    ? { conversation: { messages, enable_thinking, tools, add_generation_prompt, continue_last_message } }
    : { text: (request as GenerateRequest).text };
  return (await unary(to.client.tokenize.bind(to.client), asked, to, callOptions, signal)).token_ids;
}

async function* generate(
  to: Connection, request: GenerateRequest, callOptions: object, signal?: AbortSignal,
): AsyncGenerator<GenerateResponse__Output> {
  const call = to.client.generate(request, to.metadata, callOptions);
  const cancel = () => call.cancel();
  signal?.addEventListener("abort", cancel);
  try {
    yield* call;
  } finally {
    signal?.removeEventListener("abort", cancel);
    call.cancel(); // no effect on a call that has ended
  }
}

function unary<Q, R>(method: any, request: Q, to: Connection, callOptions: object, signal?: AbortSignal): Promise<any> {
  return new Promise((resolve, reject) => {
    const call = method(request, to.metadata, callOptions, (error: ServiceError | null, response: R) => {
      signal?.removeEventListener("abort", cancel);
      if (error) reject(error);
      else resolve(response);
    });
    const cancel = () => call.cancel();
    signal?.addEventListener("abort", cancel);
  });
}
