#include "client.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace client {
namespace {

using meshserve::v1::ChatRequest;
using meshserve::v1::ChatResponse;

constexpr auto kDeadline = std::chrono::minutes(10);
constexpr double kFirstDelaySeconds = 0.05, kMaxDelaySeconds = 2.0;

std::string Read(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + " cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

bool IsRetried(const grpc::Status& status, const Details& details) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:  // a server that shuts down answers so to calls that it has not started
      return true;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return details.retry_seconds.has_value();
    default:
      return false;
  }
}

double DelaySeconds(int num_failures, const Details& details) {
  static thread_local std::mt19937 generator(std::random_device{}());
  double backoff = std::min(kFirstDelaySeconds * std::pow(2.0, num_failures), kMaxDelaySeconds);
  backoff *= std::uniform_real_distribution<double>(0.5, 1.0)(generator);
  return std::max(backoff, details.retry_seconds.value_or(0.0));
}

}  // namespace

void Connection::Authorize(grpc::ClientContext& context) const {
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
}

Connection Connect(const std::string& target, const Options& options) {
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(Read(options.service_config));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  arguments.SetMaxReceiveMessageSize(16 << 20);
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!options.ca.empty()) {
    grpc::SslCredentialsOptions tls;
    tls.pem_root_certs = Read(options.ca);
    credentials = grpc::SslCredentials(tls);
  }
  Connection connection;
  connection.stub = meshserve::v1::InferenceService::NewStub(
      grpc::CreateCustomChannel(target, credentials, arguments));
  if (!options.token_file.empty()) {
    connection.token = Read(options.token_file);
    connection.token.erase(connection.token.find_last_not_of(" \r\n") + 1);
  }
  return connection;
}

Details DetailsOf(const grpc::Status& status) {
  Details details;
  google::rpc::Status parsed;
  if (!parsed.ParseFromString(status.error_details())) return details;
  for (const google::protobuf::Any& any : parsed.details()) {
    google::rpc::BadRequest bad_request;
    google::rpc::RetryInfo retry_info;
    if (any.UnpackTo(&bad_request) && bad_request.field_violations_size()) {
      details.field = bad_request.field_violations(0).field();
    } else if (any.UnpackTo(&retry_info)) {
      details.retry_seconds = retry_info.retry_delay().seconds() + retry_info.retry_delay().nanos() / 1e9;
    }
  }
  return details;
}

grpc::Status Stream(const Connection& connection, const ChatRequest& request, const Show& show) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  connection.Authorize(context);
  auto reader = connection.stub->Chat(&context, request);
  ChatResponse response;
  while (reader->Read(&response)) {
    if (!show(response)) {
      context.TryCancel();  // frees the request's pages at once
      while (reader->Read(&response)) continue;
      break;
    }
  }
  return reader->Finish();
}

grpc::Status StreamAgain(const Connection& connection, ChatRequest request, const Show& show, int max_failures) {
  if (!request.sampling().has_seed()) {
    std::random_device random;
    request.mutable_sampling()->set_seed((uint64_t{random()} << 31 | random() >> 1) & ~(uint64_t{1} << 63));
  }
  size_t num_tokens = 0, num_bytes = 0;  // of what was shown
  bool is_wanted = true, is_finished = false;
  for (int num_failures = 0;; ++num_failures) {
    size_t tokens_to_skip = num_tokens, bytes_to_skip = num_bytes;
    const grpc::Status status = Stream(connection, request, [&](const ChatResponse& response) {
      ChatResponse fresh = response;
      const size_t skipped_tokens = std::min<size_t>(tokens_to_skip, response.token_ids_size());
      const size_t skipped_bytes = std::min(bytes_to_skip, response.text().size());
      tokens_to_skip -= skipped_tokens;
      bytes_to_skip -= skipped_bytes;
      fresh.mutable_token_ids()->ExtractSubrange(0, static_cast<int>(skipped_tokens), nullptr);
      fresh.set_text(response.text().substr(skipped_bytes));
      num_tokens += fresh.token_ids_size();
      num_bytes += fresh.text().size();
      is_finished = response.has_finish();
      if (fresh.token_ids_size()) num_failures = 0;
      if (fresh.token_ids_size() || !fresh.text().empty() || is_finished) is_wanted = show(fresh);
      return is_wanted;
    });
    const Details details = DetailsOf(status);
    if (status.ok() || !is_wanted || !IsRetried(status, details) || num_failures >= max_failures) return status;
    std::this_thread::sleep_for(std::chrono::duration<double>(DelaySeconds(num_failures, details)));
  }
}

}  // namespace client
