// The same as streams.ts, in C++; `resume` starts again and leaves out what was shown.

#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "client.h"

namespace {

meshserve::v1::ChatRequest RequestOf(int index, int max_tokens) {
  meshserve::v1::ChatRequest request;
  auto* message = request.add_messages();
  message->set_role("user");
  message->set_content("What " + std::to_string(index));
  auto* sampling = request.mutable_sampling();
  sampling->set_max_tokens(max_tokens);
  sampling->set_temperature(0.9);
  sampling->set_top_p(0.95);
  sampling->set_seed(index);
  sampling->set_ignore_eos(true);
  return request;
}

meshserve::v1::GetLoadResponse LoadOf(const client::Connection& connection) {
  grpc::ClientContext context;
  connection.Authorize(context);
  meshserve::v1::GetLoadResponse load;
  if (!connection.stub->GetLoad(&context, {}, &load).ok()) std::abort();
  return load;
}

}  // namespace

int main(int argc, char** argv) {
  client::Options options;
  for (int i = 5; i + 1 < argc; i += 2) (std::string(argv[i]) == "--ca" ? options.ca : options.token_file) = argv[i + 1];
  const std::string mode = argv[1];
  const int num_streams = std::stoi(argv[3]), max_tokens = std::stoi(argv[4]);
  const auto connection = client::Connect(argv[2], options);
  if (mode == "refuse") {
    auto request = RequestOf(0, max_tokens);
    request.mutable_sampling()->set_top_p(7);
    const auto status = client::StreamAgain(connection, request, [](const auto&) { return true; });
    std::cout << status.error_code() << " " << client::DetailsOf(status).field << "\n";
    return 0;
  }
  std::vector<std::string> answers(num_streams), errors(num_streams);
  std::vector<std::thread> threads;
  for (int index = 0; index < num_streams; ++index) {
    threads.emplace_back([&, index] {
      const auto show = [&](const meshserve::v1::ChatResponse& response) {
        for (const auto id : response.token_ids()) {
          answers[index] += (answers[index].empty() ? "" : " ") + std::to_string(id);
        }
        return mode != "cancel";
      };
      const auto request = RequestOf(index, max_tokens);
      const auto status = mode == "resume" ? client::StreamAgain(connection, request, show)
                                           : client::Stream(connection, request, show);
      if (mode != "cancel" && !status.ok()) errors[index] = status.error_message();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (!error.empty()) std::cerr << error << "\n";
  }
  if (mode != "cancel") {
    for (const auto& answer : answers) std::cout << answer << "\n";
    return 0;
  }
  auto load = LoadOf(connection);
  while (load.num_running() + load.num_waiting() > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    load = LoadOf(connection);
  }
  std::cout << load.num_free_pages() << " of " << load.num_pages() << " pages free\n";
}
