// Streams a chat that survives the restart of a replica, cancels one, and shows a refused field.
//
//   build/chat TARGET [--ca FILE] [--token-file FILE] [MESSAGE]

#include <iostream>
#include <string>
#include <vector>

#include "client.h"

int main(int argc, char** argv) {
  client::Options options;
  std::vector<std::string> positionals;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--ca" && i + 1 < argc) {
      options.ca = argv[++i];
    } else if (argument == "--token-file" && i + 1 < argc) {
      options.token_file = argv[++i];
    } else {
      positionals.push_back(argument);
    }
  }
  const auto connection = client::Connect(positionals.empty() ? "127.0.0.1:50051" : positionals[0], options);
  meshserve::v1::ChatRequest request;
  auto* message = request.add_messages();
  message->set_role("user");
  message->set_content(positionals.size() > 1 ? positionals[1] : "Who art thou?");
  request.mutable_sampling()->set_max_tokens(200);

  std::cout << "# A chat. Restart a replica meanwhile: it goes on where it was.\n";
  const grpc::Status status = client::StreamAgain(connection, request, [](const auto& response) {
    std::cout << response.text() << std::flush;
    if (response.has_finish()) std::cout << "\n[" << FinishReason_Name(response.finish().reason()) << "]\n";
    return true;
  });
  if (!status.ok()) {
    std::cerr << status.error_code() << ": " << status.error_message() << "\n";
    return 1;
  }

  std::cout << "# Another one, cancelled after its first message: the server frees its pages at once.\n";
  client::Stream(connection, request, [](const auto& response) {
    std::cout << response.text() << "...\n";
    return false;
  });

  std::cout << "# A refused one.\n";
  request.mutable_sampling()->set_temperature(-1);
  const grpc::Status refused = client::Stream(connection, request, [](const auto&) { return true; });
  std::cout << "field " << client::DetailsOf(refused).field << ": " << refused.error_message() << "\n";
}
