// Runs context_parts.cuh on the host: how the clusters of decode attention find their parts, and how parts are merged.
#include "attention/context_parts.cuh"

#include <vector>

using namespace meshserve;

extern "C" int count_clusters(int batch, int fewest_shares, int least_share, int max_context) {
  return most_clusters(batch, fewest_shares, least_share, max_context);
}

// Writes parts [num_clusters].
extern "C" void find_parts(const ContextCuts* cuts, ContextPart* parts) {
  Block state(32);
  CudaThreads lanes(threadIdx, blockIdx, gridDim, block);
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

// Merges parts [calls, parts, G, H + 4], as attention writes them, into out [calls, G, H]. Each part has a block, the
// blocks of a call run at the same time, and the calls run one after another.
extern "C" void merge(int num_parts, int group, int num_calls, const float* parts, bf16* out) {
  constexpr int H = 128, kThreads = 128;
  struct State {
    Block block{kThreads};
    bool is_last = false;
  };
  int num_arrived = 0;
  for (int call = 0; call < num_calls; ++call) {
    std::vector<float> rows(static_cast<size_t>(num_parts) * group * (H + 4), NAN);
    std::vector<State> states(num_parts);
    CudaThreads threads(threadIdx, blockIdx, gridDim, block);
    for (int index = 0; index < num_parts; ++index) {
      for (unsigned t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, index, t] {
          threadIdx = {t};
          block = &states[index].block;
          auto for_mine = [&](auto use) {
            for (int i = t; i < group * (H / 4); i += kThreads) use(i / (H / 4), i % (H / 4) * 4);
          };
          auto merged_of = [&](int query, int element) {
            const float* row = parts + ((static_cast<size_t>(call) * num_parts + index) * group + query) * (H + 4);
            const float* at = row + element;
            return Merged{make_float4(at[0], at[1], at[2], at[3]), row[H], row[H + 1]};
          };
          auto row_of = [&](int part, int query) { return rows.data() + (part * group + query) * (H + 4); };
          auto arrive = [&] { return atomicAdd(&num_arrived, 1); };
          const ContextPart part = {0, index, num_parts};
          bf16* to = out + static_cast<size_t>(call) * group * H;
          const auto store = [&](int query, int element, const Merged& merged) {
            store_activations<Bf16Weights>(to + query * H, nullptr, element, divided_by_sum(merged));
          };
          merge_parts<H>(part, arrive, &states[index].is_last, for_mine, merged_of, row_of, store);
        });
      }
    }
  }
}
