// What every cluster of decode attention finds out from the lengths, by the source of context_parts.cuh on a host.
#include "context_parts.cuh"

#include <thread>
#include <vector>

using namespace meshserve;

extern "C" int count_clusters(int batch, int fewest_shares, int least_share, int max_context) {
  return most_clusters(batch, fewest_shares, least_share, max_context);
}

// parts [num_clusters]
extern "C" void find_parts(const ContextCuts* cuts, ContextPart* parts) {
  Block state(32);
  std::vector<std::jthread> lanes;
  for (unsigned lane = 0; lane < 32; ++lane) {
    lanes.emplace_back([&, lane] {
      threadIdx = {lane};
      block = &state;
      for (int cluster = 0; cluster < cuts->num_clusters; ++cluster) {
        const ContextPart part = find_part(cluster, static_cast<int>(lane), *cuts);
        if (static_cast<int>(lane) == cluster % 32) parts[cluster] = part;
      }
    });
  }
}
