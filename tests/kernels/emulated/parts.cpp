// Merges the parts of tiles with prefill_parts.cuh on the host. The partial results are computed here in plain C++; the
// kernel uses tensor cores for them.
#include "attention/prefill_parts.cuh"

#include <vector>

using namespace meshserve;
using namespace meshserve::prefill;

namespace {

constexpr int kThreads = 128;  // per block, which stands for one warpgroup

struct Inputs {
  const float *q, *k, *v;  // [T, K, G, H]; [B, keys, K, H] each
  int max_keys;
};

// Computes one thread's row over the keys of a part.
template <int H>
void leave_row(const Inputs& inputs, const Part& part, const Item& item, int row, const Args& args) {
  const float* q = inputs.q + query_of(item, row, args) * H;
  const int first_key = part.first_key_of(part.index), position = item.first_position + row / args.group;
  float* place = unmerged_row<H>(item, item.index, row, args);
  auto vector = [&](const float* all, int key) {
    const size_t token = static_cast<size_t>(part.request) * inputs.max_keys + first_key + key;
    return all + (token * args.kv_heads + item.kv_head) * H;
  };
  auto score = [&](int key) {
    float sum = 0.0f;
    for (int i = 0; i < H; ++i) sum += q[i] * vector(inputs.k, key)[i];
    return sum;
  };
  const int num_seen = std::min(position + 1, item.num_keys);
  float largest = -INFINITY, sum = 0.0f;
  for (int key = 0; key < num_seen; ++key) largest = std::max(largest, score(key));
  for (int i = 0; i < H; ++i) place[i] = 0.0f;
  for (int key = 0; key < num_seen; ++key) {
    const float weight = std::exp2((score(key) - largest) * args.scale_log2);
    sum += weight;
    for (int i = 0; i < H; ++i) place[i] += weight * vector(inputs.v, key)[i];
  }
  place[H] = largest;
  place[H + 1] = sum;
}

template <int H>
void work(const Inputs& inputs, const Args& args, int first_item, int num_blocks, bool* is_last, float2* row_scales) {
  for (int i = first_item; i < args.num_parts * args.kv_heads * 2; i += num_blocks) {
    const Part part = load_part(args.parts, i / 2 / args.kv_heads);
    const int warpgroup = i % 2, num_rows = part.num_tokens * args.group - 64 * warpgroup;
    if (part.num_parts < 2 || num_rows <= 0) continue;
    const int least_key = part.first_key_of(part.index);
    const int num_keys = std::min(part.num_keys(), part.first_key_of(part.index + 1)) - least_key;
    const Item item = {part.first_token, part.num_tokens,       part.first_position - least_key,
                       num_keys,         i / 2 % args.kv_heads, part.index,
                       part.num_parts,   part.first_slot};
    const int row = 64 * warpgroup + static_cast<int>(threadIdx.x);
    if (threadIdx.x < 64 && row < part.num_tokens * args.group) leave_row<H>(inputs, part, item, row, args);
    if (arrive(is_last, item, warpgroup, args)) merge_parts<H>(row_scales, item, warpgroup, args);
  }
}

}  // namespace

extern "C" void merge(int head_dim, const Args* args, const Inputs* inputs, int num_blocks) {
  struct State {
    Block block{kThreads};
    bool is_last = false;
    float2 row_scales[kTileRows];
  };
  std::vector<State> states(num_blocks);
  CudaThreads threads(threadIdx, blockIdx, gridDim, block);
  for (int b = 0; b < num_blocks; ++b) {
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, b, t] {
        threadIdx = {t};
        block = &states[b].block;
        const auto work_on = head_dim == 128 ? work<128> : work<64>;
        work_on(*inputs, *args, b, num_blocks, &states[b].is_last, states[b].row_scales);
      });
    }
  }
}
