// The experts of a step of at most 8 tokens: bound by streaming the chosen experts' weights. A single token with 8-bit
// weights has kernels of its own (one_token.cuh).
//
// A warp multiplies 16 rows of weights by the 8 tokens (row_products.cuh). It fetches its weights with the bulk tensor
// copy engine to a pipeline of its own in shared memory and waits for no other warp, so its loads stay in flight
// whatever it computes, and no register holds what has not arrived. Shared memory and registers of both kernels fit an
// SM together: down's pipelines are full when gate_up ends.
//
//   gate_up_rows_kernel  items of (expert, 16 rows of gate and the same of up) in equal ranges for each block. A warp
//                         has an eighth of the columns, and the tokens' in registers for all items. With 8-bit weights
//                         both are f16, to which the GPU converts e4m3. Writes share * silu(gate) * up for each choice,
//                         at its slot (permutation.cuh).
//   down_rows_kernel     a block owns 16 columns of the output and adds up all experts in registers, without a second
//                         pass. A warp takes every eighth unit of (expert, two blocks of columns).
//
// A copy brings 16 rows of 128 bytes with the 128-byte swizzle. A lane has the pieces 2q and 2q + 1 of 16 bytes of rows
// r and r + 8, with r = lane / 4 and q = lane % 4: its reads meet no bank conflict.
#pragma once
#include "common/sm90/ptx.cuh"
#include "experts/permutation.cuh"
#include "experts/row_products.cuh"

namespace meshserve {
namespace experts {

constexpr int kPipelineStages = 3, kPipelineRows = 16, kPipelineCopyBytes = kPipelineRows * 128,
              kPipelineStageBytes = 2 * kPipelineCopyBytes;
constexpr int kMostFewChoices = kFewTokens * 32;

// Choices of at most 8 tokens.
struct FewChoices {
  alignas(16) uint32_t tokens[kMaxExperts];  // bit t: token t chose the expert
  int first[kMaxExperts];                    // slot of its first choice
  int active[kMaxExperts];
  int chosen[kMostFewChoices];  // [T, k]
  int num_active;
  alignas(16) uint32_t keys[kMostRouted];  // keys of a single token's scores

  __device__ __forceinline__ int slot(int expert, int token) const {
    return first[expert] + __popc(tokens[expert] & ((1u << token) - 1));
  }
};

// Chooses a single token's experts by its scores, with all threads: calls `store` with the rank of each and the expert.
// `keys` are those of permutation.cuh; 0: no expert. A rank is how many come before, of which two neighboring lanes
// each count those among half of the experts. No weights are fetched before it ends. A kernel's code is not in the
// instruction caches when it starts: unrolled, the loop over groups took twice as long.
template <class Store>
__device__ __forceinline__ void choose_one(uint32_t (&keys)[kMostRouted], const RowsArgs& args, Store store) {
  constexpr int kEach = kMostRouted / kWarps, kTogether = 8;  // experts of a warp; loads in flight
  static_assert(kEach == 16);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = kEach * warp + lane / 2, half = lane % 2;
  float sum = 0.0f;
#pragma unroll 1
  for (int first = half; first < args.num_parts; first += 2 * kTogether) {
    float parts[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int part = first + 2 * u;
      parts[u] = part < args.num_parts ? __ldcg(args.scores + part * kMostRouted + expert) : 0.0f;
    }
#pragma unroll
    for (int distance = kTogether / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int u = 0; u < distance; ++u) parts[u] += parts[u + distance];
    }
    sum += parts[0];
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  const bool is_real = expert < args.num_experts;
  const uint32_t key = is_real ? key_of(sum, expert) : 0u;
  if (half == 0) keys[expert] = key;
  __syncthreads();
  const uint4* groups = reinterpret_cast<const uint4*>(keys) + half * (kMostRouted / 8);
  uint32_t rank = 0;
#pragma unroll 1
  for (int i = 0; i < kMostRouted / 8; i += kEach / 4) {
#pragma unroll
    for (int j = 0; j < kEach / 4; ++j) {
      const uint4 found = groups[i + j];
      rank += (found.x > key) + (found.y > key) + (found.z > key) + (found.w > key);
    }
  }
  rank += __shfl_xor_sync(0xffffffffu, rank, 1);
  if (is_real && half == 0 && rank < static_cast<uint32_t>(args.num_chosen)) store(rank, expert);
  __syncthreads();
}

// The scores of the token that a warp chooses for.
struct FewScores {
  float each[kScoresEach];  // scores of experts kScoresEach * lane + i
  float chosen;             // the score of choice `lane`
};

// Returns them from the keys of `choose_one`; `expert` is choice `lane`.
__device__ __forceinline__ FewScores scores_of(const uint32_t (&keys)[kMostRouted], int expert) {
  FewScores scores;
#pragma unroll
  for (int i = 0; i < kScoresEach; ++i) scores.each[i] = value_of(keys[kScoresEach * (threadIdx.x % 32) + i]);
  scores.chosen = value_of(keys[max(expert, 0)]);
  return scores;
}

// Adds up the parts of a token's scores with one warp: those of experts 4 * lane to 4 * lane + 3.
__device__ __forceinline__ float4 sum_scores(const RowsArgs& args, int token) {
  constexpr int kTogether = 16;  // loads in flight at a time
  const float* scores = args.scores + static_cast<size_t>(token) * args.num_parts * kMostRouted;
  const float4* from = reinterpret_cast<const float4*>(scores) + threadIdx.x % 32;
  float4 sum = {};
#pragma unroll 1
  for (int first = 0; first < args.num_parts; first += kTogether) {
    float4 parts[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      parts[u] = {};
      if (first + u < args.num_parts) parts[u] = __ldcg(from + (first + u) * (kMostRouted / 4));
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) sum = add(sum, parts[u]);
  }
  return sum;
}

// All threads call it, before the wait for the previous kernel where that matters.
__device__ __forceinline__ void clear(FewChoices& choices) {
  choices.tokens[threadIdx.x] = 0;
  __syncthreads();
}

// Chooses or reads the choices, and computes the rest of what is cleared. All threads call it. No weights are fetched
// before it ends, so it is short: a warp for each token, then one for all of the experts, and two barriers.
template <class W>
__device__ __forceinline__ FewScores arrange_few(FewChoices& choices, const RowsArgs& args, bool is_padding) {
  constexpr int kActive = 1 << 20;  // counted in the upper bits of the same sum
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (!W::kIsQuantized) {  // else it has kernels of its own
    if (args.num_tokens == 1 && args.scores != nullptr) {
      const bool is_token = args.positions[0] >= 0;
      if (threadIdx.x == 0) choices.num_active = is_token ? min(args.num_chosen, args.num_experts) : 0;
      choose_one(choices.keys, args, [&](int rank, int expert) {  // its slot is its rank
        choices.chosen[rank] = is_token ? expert : -1;
        choices.active[rank] = expert;
        choices.first[expert] = rank;
        choices.tokens[expert] = is_token;
      });
      return scores_of(choices.keys, lane < args.num_chosen ? choices.chosen[lane] : 0);
    }
  }
  FewScores scores = {};
  if (warp < args.num_tokens) {
    int* chosen = choices.chosen + warp * args.num_chosen;
    if (args.scores == nullptr) {
      if (lane < args.num_chosen) chosen[lane] = __ldcg(args.experts + warp * args.num_chosen + lane);
    } else {
      const float4 found = sum_scores(args, warp);
      scores = {{found.x, found.y, found.z, found.w}, 0.0f};
      scores.chosen = choose(scores.each, args.num_experts, args.num_chosen, is_padding, chosen);
    }
    __syncwarp();
    const int expert = lane < args.num_chosen ? chosen[lane] : -1;
    if (expert >= 0 && expert < args.num_experts) atomicOr(&choices.tokens[expert], 1u << warp);
  }
  __syncthreads();
  if (warp == 0) {
    int before = 0;
#pragma unroll 1
    for (int first = 4 * lane; first - 4 * lane < args.num_experts; first += 128) {
      const uint4 tokens = *reinterpret_cast<const uint4*>(choices.tokens + first);
      const int counts[4] = {__popc(tokens.x), __popc(tokens.y), __popc(tokens.z), __popc(tokens.w)};
      int all = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) all += counts[i] == 0 ? 0 : counts[i] + kActive;
      int sum = all;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int lower = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += lower;
      }
      int slot = before + sum - all;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        choices.first[first + i] = slot % kActive;
        if (counts[i] > 0) choices.active[slot / kActive] = first + i;
        slot += counts[i] == 0 ? 0 : counts[i] + kActive;
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) choices.num_active = before / kActive;
  }
  __syncthreads();
  return scores;
}

// Divides numbers below 2^32 / divisor by a positive divisor.
class Divisor {
 public:
  __device__ __forceinline__ explicit Divisor(uint32_t divisor) : factor_(0xffffffffu / divisor + 1) {}
  __device__ __forceinline__ uint32_t divide(uint32_t number) const {
    return factor_ == 0 ? number : __umulhi(number, factor_);  // 0: the divisor is 1
  }

 private:
  uint32_t factor_;  // 2^32 / divisor, rounded up
};

// Returns whether the token that a warp chooses for is padding.
__device__ __forceinline__ bool is_padding_token(const RowsArgs& args) {
  const int token = threadIdx.x / 32;
  return args.scores != nullptr && token < args.num_tokens && args.positions[token] < 0;
}

// The tokens' columns that meet a lane's pieces of a block of weights: for piece s, what `multiply` takes.
template <class W>
using TokenBlock = uint4[2][RowFormat<W>::kTokenLoads];

// Loads them from a row of activations; null: zeros.
template <class W>
__device__ __forceinline__ void load_token_block(TokenBlock<W>& to, const bf16* row, int block, bool is_ordered) {
  constexpr int kLoads = RowFormat<W>::kTokenLoads;
  // The pieces 2q and 2q + 1 are consecutive.
  const uint4* from = reinterpret_cast<const uint4*>(row + block * W::kBlockColumns) + threadIdx.x % 4 * 2 * kLoads;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) to[s][i] = row == nullptr ? make_uint4(0, 0, 0, 0) : from[s * kLoads + i];
    if constexpr (W::kIsQuantized) {
      if (!is_ordered) {
        const uint4 low = to[s][0], high = to[s][1];
        to[s][0] = make_uint4(__byte_perm(low.x, low.y, 0x5410), __byte_perm(low.z, low.w, 0x5410),
                              __byte_perm(high.x, high.y, 0x5410), __byte_perm(high.z, high.w, 0x5410));
        to[s][1] = make_uint4(__byte_perm(low.x, low.y, 0x7632), __byte_perm(low.z, low.w, 0x7632),
                              __byte_perm(high.x, high.y, 0x7632), __byte_perm(high.z, high.w, 0x7632));
      }
    }
  }
}

// A block of a token in f16, times a power of two for each block, which takes its largest number to 2^14 and more. f16
// has more bits than bf16, and numbers below 2^-28 of the largest lose some. `back` is the reciprocal of the power.
// Pairs of columns are in the order of e4m3_to_f16.
__device__ __forceinline__ void convert_token_block(TokenBlock<Fp8Weights>& tokens, float& back) {
  constexpr uint32_t kLargest = 14, kBias = 127;
  uint32_t largest = 0;
  auto note = [&](uint32_t word) { largest = max(largest, max(word & 0x7FFFu, word >> 16 & 0x7FFFu)); };
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) note(tokens[s][i].x), note(tokens[s][i].y), note(tokens[s][i].z), note(tokens[s][i].w);
  }
  largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  const uint32_t exponent = max(largest >> 7, kLargest + 1);
  const float factor = __uint_as_float((2 * kBias + kLargest - exponent) << 23);
  back = __uint_as_float((exponent - kLargest) << 23);
  auto convert = [&](uint32_t& even, uint32_t& odd) {  // columns 0 and 2, and 1 and 3, to 0 and 1, and 2 and 3
    const uint32_t low = pack_f16(__uint_as_float(even << 16) * factor, __uint_as_float(odd << 16) * factor);
    odd = pack_f16(__uint_as_float(even & 0xFFFF0000u) * factor, __uint_as_float(odd & 0xFFFF0000u) * factor);
    even = low;
  };
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    convert(tokens[s][0].x, tokens[s][1].x);
    convert(tokens[s][0].y, tokens[s][1].y);
    convert(tokens[s][0].z, tokens[s][1].z);
    convert(tokens[s][0].w, tokens[s][1].w);
  }
}

// c += 16 rows of e4m3 weights times 8 tokens in f16, over a piece.
__device__ __forceinline__ void multiply_f16(float (&c)[4], uint4 low, uint4 high, const uint4 (&token)[2]) {
  const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
  const uint32_t first[4] = {token[0].x, token[0].y, token[0].z, token[0].w};
  const uint32_t second[4] = {token[1].x, token[1].y, token[1].z, token[1].w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t a[4];
    e4m3_to_f16(lows[j], a[0], a[2]);
    e4m3_to_f16(highs[j], a[1], a[3]);
    multiply_16x8x16_f16(c, a, first[j], second[j]);
  }
}

// A lane's pieces of a copy: of each of two, rows r and r + 8.
struct WeightBlock {
  uint4 pieces[2][2];

  __device__ __forceinline__ void load(uint32_t copy) {
    const int lane = threadIdx.x % 32, row = lane / 4;
    const uint32_t from = copy + row * 128 + ((lane % 4 * 2) ^ row) * 16;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      pieces[s][0] = load_shared(from ^ (s * 16));
      pieces[s][1] = load_shared((from ^ (s * 16)) + 1024);
    }
  }
};

// c += scale * (weights tokens), with tokens as `convert_token_block` has them; `back` is that of the lane's two
// columns.
__device__ __forceinline__ void multiply_block_f16(float (&c)[4], const WeightBlock& weights,
                                                   const TokenBlock<Fp8Weights>& tokens, float scale,
                                                   const float (&back)[2]) {
  float part[2][4] = {};
#pragma unroll
  for (int s = 0; s < 2; ++s) multiply_f16(part[s], weights.pieces[s][0], weights.pieces[s][1], tokens[s]);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] = fmaf(scale * back[i % 2], part[0][i] + part[1][i], c[i]);
}

// c += scale * (weights tokens)
template <class W>
__device__ __forceinline__ void multiply_block(float (&c)[4], const WeightBlock& weights, const TokenBlock<W>& tokens,
                                               float scale) {
  if constexpr (W::kIsQuantized) {
    float part[2][4] = {};
#pragma unroll
    for (int s = 0; s < 2; ++s) multiply(part[s], weights.pieces[s][0], weights.pieces[s][1], tokens[s]);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = fmaf(scale, part[0][i] + part[1][i], c[i]);
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) multiply(c, weights.pieces[s][0], weights.pieces[s][1], tokens[s]);
  }
}

// The pipelines of all warps of a block.
struct PipelineMemory {
  uint8_t stages[kWarps][kPipelineStages][kPipelineStageBytes];
  uint64_t full[kWarps][kPipelineStages];
};

// A warp's pipeline. A stage has two copies, of 16 rows and a block of columns each.
template <class W>
class WarpPipeline {
 public:
  __device__ __forceinline__ WarpPipeline(PipelineMemory& memory, const CUtensorMap& map)
      : map_(map),
        policy_(evict_first_policy()),
        stages_(shared_address(memory.stages[threadIdx.x / 32])),
        full_(shared_address(memory.full[threadIdx.x / 32])) {
    if (threadIdx.x % 32 != 0) return;
    prefetch_map(&map_);
    for (int s = 0; s < kPipelineStages; ++s) barrier_init(full_ + 8 * s, 1);
    barrier_init_fence();
  }

  // Fetches a stage, with one lane.
  __device__ __forceinline__ void fetch(int stage, int row, int block, int second_row, int second_block) {
    const uint32_t to = stages_ + stage * kPipelineStageBytes, barrier = full_ + 8 * stage;
    barrier_expect_bytes(barrier, kPipelineStageBytes);
    copy_bytes(to, &map_, row, block * W::kBlockColumns, barrier, policy_);
    copy_bytes(to + kPipelineCopyBytes, &map_, second_row, second_block * W::kBlockColumns, barrier, policy_);
  }

  // Fills the pipeline: `fetch_next(stage)` fetches what comes next, if there is more.
  template <class FetchNext>
  __device__ __forceinline__ void fill(FetchNext fetch_next) {
#pragma unroll 1
    for (int s = 0; s < kPipelineStages; ++s) fetch_next(s);
  }

  // Takes the weights of a stage, which is then free for what comes next.
  template <class FetchNext>
  __device__ __forceinline__ void take(WeightBlock (&weights)[2], FetchNext fetch_next) {
    barrier_wait(full_ + 8 * stage_, parity_);
#pragma unroll
    for (int i = 0; i < 2; ++i) weights[i].load(stages_ + stage_ * kPipelineStageBytes + i * kPipelineCopyBytes);
    __syncwarp();  // all lanes have read the stage
    fetch_next(stage_);
    if (++stage_ == kPipelineStages) stage_ = 0, parity_ ^= 1;
  }

 private:
  const CUtensorMap& map_;
  const uint64_t policy_;
  const uint32_t stages_, full_;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

struct GateUpRowsMemory {
  PipelineMemory pipelines;
  float parts[2][kWarps][2 * kPipelineRows][kFewTokens];
  FewChoices choices;
  float shares[kMostFewChoices];  // for each slot
  float inverse_rms[kFewTokens];
};

// Grid: any number of blocks. A row has 8 * kBlocks blocks of 128 bytes.
template <class W, int kBlocks>
__global__ void __launch_bounds__(kThreads, 2)
    gate_up_rows_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& memory = *reinterpret_cast<GateUpRowsMemory*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = args.columns;
  FewChoices& choices = memory.choices;
  WarpPipeline<W> pipeline(memory.pipelines, weights);
  clear(choices);
  touch_parameters(args);
  const bool is_padding = is_padding_token(args);
  const int tiles = args.rows / kPipelineRows;
  const Divisor by_blocks(gridDim.x), by_tiles(tiles);
  wait_for_previous_kernel();
  let_next_kernel_start();  // only now, since down reads the choices or scores before its wait
  const FewScores scores = arrange_few<W>(choices, args, is_padding);

  const int num_items = choices.num_active * tiles;
  const int first_item = by_blocks.divide(num_items * blockIdx.x);
  const int last_item = by_blocks.divide(num_items * (blockIdx.x + 1));
  // An item is tile `tile` of rows of an active expert; `index` counts the items.
  struct Item {
    int index, active, tile;
  };
  const int first_active = by_tiles.divide(first_item);
  const Item first = {first_item, first_active, first_item - first_active * tiles};
  auto advance = [&](Item& item) {
    ++item.index;
    if (++item.tile == tiles) item.tile = 0, ++item.active;
  };
  // Returns the first row of gate in the stack, for an item.
  auto row_of = [&](const Item& item) {
    return args.first_row + choices.active[item.active] * 2 * args.rows + item.tile * kPipelineRows;
  };
  Item next_fetch = first;
  int fetch_block = 0;
  auto fetch = [&](int stage) {
    if (next_fetch.index == last_item) return;
    if (lane == 0) {
      const int row = row_of(next_fetch), block = warp * kBlocks + fetch_block;
      pipeline.fetch(stage, row, block, row + args.rows, block);
    }
    if (++fetch_block == kBlocks) fetch_block = 0, advance(next_fetch);
  };
  pipeline.fill(fetch);
  if (args.scores != nullptr && blockIdx.x == 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < args.num_tokens * args.num_chosen; i += kThreads) args.chosen[i] = choices.chosen[i];
  }
  if (first_item == last_item) return;
  // Lane 2b + h has the scale of the warp's block b, of gate (h = 0) or up.
  auto load_scale = [&](const Item& item) {
    ScaleInFlight scale = {};
    if constexpr (W::kIsQuantized) {
      const int group = (warp * kBlocks + lane / 2) * W::kBlockColumns >> args.scales.columns_log2;
      const int grid_row = (row_of(item) + lane % 2 * args.rows) / args.scales.rows_each;
      if (lane < 2 * kBlocks) scale.load(args.scales, static_cast<size_t>(grid_row) * args.scales.grid_columns + group);
    }
    return scale;
  };
  ScaleInFlight scale = load_scale(first);
  // The norm of the token of which this warp computes the shares, and shares that are given.
  float squares = 0.0f, share = 0.0f;
  if (warp < args.num_tokens) {
    if (args.sums != nullptr) squares = lane_squares(args.sums + warp * args.norm_tiles, args.norm_tiles);
    if (args.scores == nullptr && lane < args.num_chosen) share = __ldcg(args.shares + warp * args.num_chosen + lane);
  }
  // Lanes of tokens that the step does not have read another one's.
  const bf16* token_row = args.input + static_cast<size_t>(min(lane / 4, args.num_tokens - 1)) * columns;
  TokenBlock<W> tokens[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) load_token_block<W>(tokens[b], token_row, warp * kBlocks + b, args.is_ordered);
  float back[kBlocks][2];
  if constexpr (W::kIsQuantized) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float mine;
      convert_token_block(tokens[b], mine);
#pragma unroll
      for (int i = 0; i < 2; ++i) back[b][i] = __shfl_sync(0xffffffffu, mine, lane % 4 * 8 + 4 * i);
    }
  }
  if (warp < args.num_tokens) {
    const float inverse = args.sums == nullptr ? 1.0f : inverse_rms_of(squares, args.inverse_dim, args.epsilon);
    if (lane == 0) memory.inverse_rms[warp] = inverse;
    if (args.scores != nullptr) {
      share =
          share_of_choice(scores.each, scores.chosen, inverse, args.num_experts, args.num_chosen, args.is_normalized);
    }
    if (lane < args.num_chosen) {
      const int expert = choices.chosen[warp * args.num_chosen + lane];
      if (expert >= 0 && expert < args.num_experts) memory.shares[choices.slot(expert, warp)] = share;
    }
  }
  // The barrier of the first item orders the stores above before they are read.
#pragma unroll 1
  for (Item item = first, next = first; item.index < last_item; item = next) {
    const float my_scale = W::kIsQuantized ? scale.value(args.scales) : 1.0f;
    advance(next);
    if (next.index < last_item) scale = load_scale(next);
    float c[2][4] = {};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      WeightBlock of[2];
      pipeline.take(of, fetch);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if constexpr (W::kIsQuantized) {
          multiply_block_f16(c[m], of[m], tokens[b], __shfl_sync(0xffffffffu, my_scale, 2 * b + m), back[b]);
        } else {
          multiply_block<W>(c[m], of[m], tokens[b], 1.0f);
        }
      }
    }

    auto& parts = memory.parts[item.index % 2];  // two, so that one barrier an item suffices
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float* to = &parts[warp][m * kPipelineRows + lane / 4][2 * (lane % 4)];
      *reinterpret_cast<float2*>(to) = make_float2(c[m][0], c[m][1]);
      *reinterpret_cast<float2*>(to + 8 * kFewTokens) = make_float2(c[m][2], c[m][3]);
    }
    __syncthreads();
    const int expert = choices.active[item.active], row = threadIdx.x % kPipelineRows,
              token = threadIdx.x / kPipelineRows;
    if (token < kFewTokens && (choices.tokens[expert] >> token & 1)) {
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int p = 0; p < kWarps; ++p) {
        gate += parts[p][row][token];
        up += parts[p][kPipelineRows + row][token];
      }
      const float inverse = memory.inverse_rms[token];
      const int slot = choices.slot(expert, token);
      args.out[static_cast<size_t>(slot) * args.rows + ordered_column<W>(item.tile * kPipelineRows + row)] =
          __float2bfloat16(silu(gate * inverse) * (up * inverse) * memory.shares[slot]);
    }
  }
}

struct DownRowsMemory {
  PipelineMemory pipelines;
  float parts[kWarps][kPipelineRows][kFewTokens];
  FewChoices choices;
};

// Grid: rows / 16 blocks.
template <class W>
__global__ void __launch_bounds__(kThreads, 2)
    down_rows_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ RowsArgs args) {
  constexpr int kBlocks = 2;  // in a unit
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& memory = *reinterpret_cast<DownRowsMemory*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  FewChoices& choices = memory.choices;
  let_next_kernel_start();
  WarpPipeline<W> pipeline(memory.pipelines, weights);
  clear(choices);
  touch_parameters(args);
  // Before the wait: gate_up lets this kernel start when the choices or scores have been written.
  arrange_few<W>(choices, args, is_padding_token(args));

  const int blocks = (args.columns + W::kBlockColumns - 1) / W::kBlockColumns;
  const int units_each = (blocks + kBlocks - 1) / kBlocks, num_units = choices.num_active * units_each;
  // The warp's unit number i is unit warp + 8 * i.
  const int num_mine = num_units > warp ? (num_units - warp + kWarps - 1) / kWarps : 0;
  struct Unit {
    int active, part;  // the expert, and which of its units
  };
  auto unit_of = [&](int i) { return Unit{(warp + kWarps * i) / units_each, (warp + kWarps * i) % units_each}; };
  const Unit step = {kWarps / units_each, kWarps % units_each};
  auto advance = [&](Unit& unit) {  // to the warp's next one
    unit.active += step.active;
    unit.part += step.part;
    if (unit.part >= units_each) unit.part -= units_each, ++unit.active;
  };
  auto row_of = [&](const Unit& unit) {
    return args.first_row + choices.active[unit.active] * args.rows + static_cast<int>(blockIdx.x) * kPipelineRows;
  };
  Unit next_fetch = unit_of(0), next_tokens = next_fetch;
  int num_fetched = 0;
  auto fetch = [&](int stage) {
    if (num_fetched == num_mine) return;
    if (lane == 0) {
      const int row = row_of(next_fetch), block = next_fetch.part * kBlocks;  // columns beyond the matrix are zeros
      pipeline.fetch(stage, row, block, row, block + 1);
    }
    ++num_fetched;
    advance(next_fetch);
  };
  pipeline.fill(fetch);
  // Lane 2j + b has the scale of block b of the warp's unit number 16 * n + j.
  auto load_scales = [&](int first) {
    ScaleInFlight scale = {};
    if constexpr (W::kIsQuantized) {
      const int i = first + lane / 2;
      if (i < num_mine) {
        const Unit unit = unit_of(i);
        const int block = min(unit.part * kBlocks + lane % 2, blocks - 1);
        const size_t grid_row = row_of(unit) / args.scales.rows_each;
        scale.load(args.scales,
                   grid_row * args.scales.grid_columns + (block * W::kBlockColumns >> args.scales.columns_log2));
      }
    }
    return scale;
  };
  ScaleInFlight scale = load_scales(0), next_scale = load_scales(16);
  const DownAddends addends = load_down_addends(args);
  wait_for_previous_kernel();

  TokenBlock<W> tokens[2][kBlocks];
  auto load_tokens = [&](TokenBlock<W>(&to)[kBlocks], int i) {  // unit number i is the next one
    if (i >= num_mine) return;
    const int expert = choices.active[next_tokens.active], token = lane / 4;
    const bool has_token = choices.tokens[expert] >> token & 1;
    const bf16* row = args.input + static_cast<size_t>(choices.slot(expert, token)) * args.columns;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int block = next_tokens.part * kBlocks + b;
      // A lane's columns may lie beyond the row.
      const int last_column = block * W::kBlockColumns + (lane % 4 + 1) * W::kBlockColumns / 4;
      load_token_block<W>(to[b], has_token && last_column <= args.columns ? row : nullptr, block, true);
    }
    advance(next_tokens);
  };
  load_tokens(tokens[0], 0);
  load_tokens(tokens[1], 1);
  float c[4] = {};
#pragma unroll 1
  for (int first = 0; first < num_mine; first += 2) {
    if (first > 0 && first % 16 == 0) scale = next_scale, next_scale = load_scales(first + 16);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (first + u >= num_mine) break;
      WeightBlock of[kBlocks];
      pipeline.take(of, fetch);
      const float my_scale = W::kIsQuantized ? scale.value(args.scales) : 1.0f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        multiply_block<W>(c, of[b], tokens[u][b],
                          W::kIsQuantized ? __shfl_sync(0xffffffffu, my_scale, (first + u) % 16 * 2 + b) : 1.0f);
      }
      load_tokens(tokens[u], first + u + 2);
    }
  }
  float* to = &memory.parts[warp][lane / 4][2 * (lane % 4)];
  *reinterpret_cast<float2*>(to) = make_float2(c[0], c[1]);
  *reinterpret_cast<float2*>(to + 8 * kFewTokens) = make_float2(c[2], c[3]);
  __syncthreads();
  store_down<W>(args, memory.parts, addends);
}

}  // namespace experts
}  // namespace meshserve
