// Connects to meshserve servers, streams answers, and reads the details of errors.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <grpcpp/grpcpp.h>

#include "meshserve/v1/inference.grpc.pb.h"

namespace client {

struct Options {
  std::string ca;          // PEM file of the authority that signed the server's certificate; empty: no TLS
  std::string token_file;  // file that contains the token and nothing else; empty: no token
  std::string service_config = "protos/service_config.json";
};

struct Connection {
  std::unique_ptr<meshserve::v1::InferenceService::Stub> stub;
  std::string token;

  // Adds the token to the metadata of a call.
  void Authorize(grpc::ClientContext& context) const;
};

// Connects to a server, or to several replicas: "dns:///meshserve:50051", "ipv4:10.0.0.1:50051,10.0.0.2:50051".
// Throws std::runtime_error if a file cannot be read.
Connection Connect(const std::string& target, const Options& options = {});

// What the server says about an error beyond its code and message.
struct Details {
  std::string field;                    // the request field at fault; empty if none is
  std::optional<double> retry_seconds;  // when to retry
};
Details DetailsOf(const grpc::Status& status);

// Is given what is new; returns whether to go on. Cancels the call if not.
using Show = std::function<bool(const meshserve::v1::ChatResponse&)>;

// Streams one answer. The token of `connection` and a deadline are set.
grpc::Status Stream(const Connection& connection, const meshserve::v1::ChatRequest& request, const Show& show);

// Like Stream, and starts again wherever the stream is interrupted, on any replica, at most `max_failures` times in a row
// without a new token. As tokens depend only on prompt, seed and position, the same ones come again: those that were shown
// before are left out. That computes them twice; the examples in Go and TypeScript resume, which does not.
grpc::Status StreamAgain(const Connection& connection, meshserve::v1::ChatRequest request, const Show& show,
                         int max_failures = 20);

}  // namespace client
