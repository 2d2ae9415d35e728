// Connects to meshserve servers, and reads the details of their errors.

import { readFileSync } from "node:fs";
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";
import type { Status__Output } from "./gen/google/rpc/Status.js";
import type { ProtoGrpcType } from "./gen/inference.js";
import type { InferenceServiceClient } from "./gen/meshserve/v1/InferenceService.js";

const PROTOS = "protos"; // what `meshserve protos protos` wrote
const FILES = ["meshserve/v1/inference.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"];

// Names as in the contract. 64-bit numbers are strings: a seed above 2^53 - 1 has no exact JavaScript number.
const definition = loader.loadSync(FILES, {
  keepCase: true, longs: String, enums: String, defaults: true, oneofs: true, includeDirs: [PROTOS],
});
const meshserve = (grpc.loadPackageDefinition(definition) as unknown as ProtoGrpcType).meshserve.v1;

export interface Options {
  ca?: string; // PEM file of the authority that signed the server's certificate; without it, no TLS
  tokenFile?: string; // file that contains the token and nothing else
}

export interface Connection {
  client: InferenceServiceClient;
  metadata: grpc.Metadata; // pass it with every call
}

/** Connects to a server, or to replicas: "dns:///meshserve:50051", "ipv4:10.0.0.1:50051,10.0.0.2:50051". */
export function connect(target: string, options: Options = {}): Connection {
  const credentials = options.ca
    ? grpc.credentials.createSsl(readFileSync(options.ca))
    : grpc.credentials.createInsecure();
  const metadata = new grpc.Metadata();
  if (options.tokenFile) metadata.set("authorization", `Bearer ${readFileSync(options.tokenFile, "utf8").trim()}`);
  const client = new meshserve.InferenceService(target, credentials, {
    "grpc.service_config": readFileSync(`${PROTOS}/service_config.json`, "utf8"),
    "grpc.keepalive_time_ms": 30_000,
    "grpc.max_reconnect_backoff_ms": 2_000,
    "grpc.max_receive_message_length": 16 * 2 ** 20,
  });
  return { client, metadata };
}

/** What the server says about an error beyond its code and message. */
export interface Details {
  field?: string; // the request field at fault
  retrySeconds?: number; // when to retry
}

export function detailsOf(error: grpc.ServiceError): Details {
  const details: Details = {};
  const [bytes] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!(bytes instanceof Buffer)) return details;
  const status = decode("google.rpc.Status", bytes) as Status__Output;
  for (const any of status.details as unknown as { type_url: string; value: Buffer }[]) {
    const name = any.type_url.split("/").at(-1)!;
    if (name === "google.rpc.BadRequest") details.field = decode(name, any.value).field_violations[0]?.field;
    if (name === "google.rpc.RetryInfo") {
      const { seconds, nanos } = decode(name, any.value).retry_delay;
      details.retrySeconds = Number(seconds) + nanos / 1e9;
    }
  }
  return details;
}

function decode(name: string, bytes: Buffer): any {
  return (definition[name] as loader.MessageTypeDefinition<object, object>).deserialize(bytes);
}
