// The experts of a step in which an expert has few tokens: products of 256 rows of one expert's weights by 16, 32 or 64
// of its tokens, with wgmma. Weights are the left operand and tokens the right one, both in shared memory as they lie
// in memory, so that an expert of few tokens costs hardly more than the time to read it.
//
// bf16 weights are multiplied with bf16 tokens. e4m3 weights are multiplied on the FP8 tensor cores, with tokens that
// are e4m3 numbers and a scale for each 128 columns: the sums over 128 columns, in float32, are multiplied by the
// scales of the weights' block and of the token, and added up in float32.
//
// Persistent blocks, one an SM, take tiles of equal work in turn. One warp fetches units of 64 rows of weights by 256
// bytes (of shorter stretches, the memory delivers less), the tokens' 256 bytes, and scales, into two rings. Of a
// tile's four units of the same columns, the first warpgroup multiplies the first and third, the second one the others.
//   gate_up: 128 rows of gate, and the same rows of up, of which a thread has both. Stores share * silu(gate) * up: in
//            bf16, or rounded to e4m3, with a scale for the 128 rows, which are columns of down; the share is in it
//   down:    256 rows. It finds its tiles and fetches its first weights while gate_up still runs
//
// In a decode step (kPlaces), the kernels also find the places of the choices by themselves, and one
// more warp copies each tile's tokens to shared memory from where the router has left them, so that no kernel puts
// tokens in order; shares are multiplied when a token's experts are added up. Then gate_up does not wait for the
// choices before it fetches its first weights: each block begins with a fixed expert's first tile, which is dropped if
// no token chose this expert.
#pragma once
#include "expert_parts.cuh"
#include "expert_tiles.cuh"
#include "rounding.cuh"
#include "wgmma_e4m3.cuh"

namespace meshserve {
namespace experts {

constexpr int kNarrowConsumers = 256;
constexpr int narrow_threads(bool places) { return places ? 320 : 288; }
constexpr int kHalfRows = 128;  // of a tile's weights: of gate or of up, or the lower or upper ones of down
constexpr int kUnitRows = 64, kGroups = 2, kUnitBytes = kGroups * kUnitRows * 128;
constexpr int kFp8Columns = 128;   // that share a scale
constexpr int kFp8LaneScales = 2;  // each lane of a warp holds the scales of so many times 128 columns
constexpr int kFp8MostColumns = 32 * kFp8LaneScales * kFp8Columns;
template <int N>
constexpr int kUnits = N <= 32 ? 10 : 8;  // in shared memory
template <int N>
constexpr int kChunks = N <= 32 ? 3 : 2;  // of tokens

// A copy must begin at a multiple of 16 bytes, so the scales of a tile's tokens begin up to 3 before them.
constexpr int kMoreScales = 4;
__device__ __forceinline__ int first_scale(int token) { return token / kMoreScales * kMoreScales; }

struct NarrowTilesArgs {
  const int* first;       // [kMaxExperts + 1]: of each expert's tokens
  const float* share_of;  // of each place
  void* out;              // [places, rows]: e4m3 of gate_up with 8-bit weights, else bf16
  float* out_scales;      // of e4m3 [rows / 128, stride]
  Scales scales;          // of 8-bit weights
  int rows, columns;      // rows of the output: an expert is [2, rows, columns] or [rows, columns]
  int first_row;          // of the layer in the stack of all layers
  int stride;             // of out_scales
  // With kPlaces:
  const int* experts;         // [T, k]: the choices
  const void* tokens;         // gate_up: the normed tokens [T, columns]: e4m3 with 8-bit weights, else bf16
  const float* token_scales;  // of e4m3 [columns / 128, stride]
  int* places;                // gate_up: of each choice, written [T, k]
  int num_tokens, num_chosen, num_experts;
};

// The scales of a tile's first and second rows, for all columns: a lane has those of columns 128 * (lane + 32 * i).
struct TileScales {
  ScaleInFlight first[kFp8LaneScales] = {}, second[kFp8LaneScales] = {};

  __device__ __forceinline__ TileScales(const Scales& s, int row, int second_row, int blocks) {
    if (blocks == 0) return;
    const int grid_row = min(second_row / s.rows_each, s.grid_rows - 1);  // the last tile may exceed the matrix
#pragma unroll
    for (int i = 0; i < kFp8LaneScales; ++i) {
      const int group = threadIdx.x % 32 + 32 * i;
      if (group >= blocks) continue;
      first[i].load(s, static_cast<size_t>(row / s.rows_each) * s.grid_columns + group);
      second[i].load(s, static_cast<size_t>(grid_row) * s.grid_columns + group);
    }
  }
  // Returns those of block k of columns. All lanes call it.
  __device__ __forceinline__ float2 of(const Scales& s, int k) const {
    const float low = (k < 32 ? first[0] : first[1]).value(s), high = (k < 32 ? second[0] : second[1]).value(s);
    return make_float2(__shfl_sync(0xffffffffu, low, k % 32), __shfl_sync(0xffffffffu, high, k % 32));
  }
};

template <int N>
struct NarrowTilesMemory {
  uint8_t units[kUnits<N>][kUnitBytes];
  uint8_t tokens[kChunks<N>][kGroups * N * 128];
  alignas(128) float token_scales[kChunks<N>][kGroups][(N + kMoreScales + 31) / 32 * 32];
  float scales[kUnits<N>][kGroups];
  float highest[2][kWarps][N];  // of a warp's rows of each token; two, so that one barrier a tile suffices
  uint64_t full[kUnits<N>], empty[kUnits<N>];
  uint64_t tokens_full[kChunks<N>], tokens_empty[kChunks<N>];
  int first_tile[kMaxExperts + 1], first_token[kMaxExperts + 1];
  int totals[kWarps];
};
template <int N>
struct PlacesMemory : NarrowTilesMemory<N> {
  Choices choices;
};

// The tiles of a block of gate_up that finds its choices by itself. Experts' first tiles of tokens are reserved for the
// first blocks, in order; tiles that are left have numbers in order of experts. A block takes its reserved tile, or if
// no token chose that expert, one of the first that are left, and then every gridDim-th of the others.
struct ReservedTile {
  int expert, row;     // of the reserved tile
  bool is_reserved;    // for this block
  bool is_chosen;      // whether tokens chose the expert
  int num_before;      // lower blocks that have no tile reserved for them
  int num_unreserved;  // of all blocks

  __device__ __forceinline__ int number(int i) const {  // of the block's tile i among those that are left
    if (i == 0) return num_before;
    return num_unreserved + blockIdx.x + (i - 1) * gridDim.x;
  }
};

// Adds the product of a unit to the sums of its 64 rows. `groups` of its columns exist; `token` is the tile's first.
template <class W, int N>
__device__ __forceinline__ void add_unit(float (&sums)[N / 2], const NarrowTilesMemory<N>& memory, int unit, int chunk,
                                         int token, int groups, bool is_first) {
  const int lane = threadIdx.x % 32;
  const uint64_t weights = tile_descriptor(shared_address(memory.units[unit]));
  const uint64_t tokens = tile_descriptor(shared_address(memory.tokens[chunk]));
  if constexpr (W::kIsQuantised) {
    float partial[2][N / 2];
    auto multiply = [&](int g) {
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_e4m3<N>(partial[g % 2], moved_on(weights, g * kUnitRows * 128) + 2 * i,
                         moved_on(tokens, g * N * 128) + 2 * i, i > 0);
      }
      wgmma_commit();
    };
    auto scale = [&](int g) {
      keep_in_place(partial[g % 2]);
      const float of_rows = memory.scales[unit][g];
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        const float* of_tokens = memory.token_scales[chunk][g] + token % kMoreScales + 8 * j + 2 * (lane % 4);
        const float scale[2] = {of_rows * of_tokens[0], of_rows * of_tokens[1]};
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
          sums[i] = fmaf(scale[i % 2], partial[g % 2][i], is_first && g == 0 ? 0.0f : sums[i]);
        }
      }
    };
    multiply(0);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g >= groups) break;
      const bool has_next = g + 1 < kGroups && g + 1 < groups;
      if (has_next) multiply(g + 1);
      if (has_next) {
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      scale(g);
    }
  } else {
    wgmma_begin();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g >= groups) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma<N>(sums, moved_on(weights, g * kUnitRows * 128) + 2 * i, moved_on(tokens, g * N * 128) + 2 * i,
                 !is_first || g + i > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_place(sums);
  }
}

// Stores a warp's 16 rows of the tokens as bf16. `to` is the first row's number of the tile's first token.
template <int N>
__device__ __forceinline__ void store_rows(bf16* to, int stride, const float (&sums)[N / 2], int num_tokens,
                                           int num_rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 8 rows by 8 tokens: a lane then has two rows of a token
      const uint32_t pair = transpose_8x8(pack_bf16(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]));
      const int token = 8 * j + lane / 4, row = 8 * half + 2 * (lane % 4);
      if (token < num_tokens && row < num_rows) {
        *reinterpret_cast<uint32_t*>(to + static_cast<size_t>(token) * stride + row) = pair;
      }
    }
  }
}

// Stores a warp's 16 rows of the tokens as e4m3, multiplied by the inverses of the lane's tokens' scales.
template <int N>
__device__ __forceinline__ void store_rows(uint8_t* to, int stride, const float (&values)[N / 2],
                                           const float (&inverse)[N / 4], int num_tokens) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    uint32_t pairs = 0;  // rows r and r + 8 of each of two tokens
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float factor = inverse[2 * j + t];
      pairs |= static_cast<uint32_t>(to_e4m3(values[4 * j + t] * factor, values[4 * j + t + 2] * factor)) << 16 * t;
    }
    // 8 rows by 8 tokens: a lane then has rows 2q, 2q + 8, 2q + 1 and 2q + 9 of a token, where q = lane % 4.
    pairs = __byte_perm(transpose_8x8(pairs), 0u, 0x3120);
    // Of the neighboring lane's, one gets rows 2q and 2q + 1, the other 2q + 8 and 2q + 9.
    const uint32_t other = __shfl_xor_sync(0xffffffffu, pairs, 1);
    const uint32_t four = lane % 2 == 0 ? __byte_perm(pairs, other, 0x5410) : __byte_perm(other, pairs, 0x7632);
    const int token = 8 * j + lane / 4, row = lane % 4 / 2 * 4 + lane % 2 * 8;
    if (token < num_tokens) *reinterpret_cast<uint32_t*>(to + static_cast<size_t>(token) * stride + row) = four;
  }
}

// Computes the first token of each expert and the first of its tiles that are left, and returns their number. Of the
// first `num_reserved` experts, the first tiles are not among these. `reserved.expert` is given. All threads call it.
template <int N>
__device__ __forceinline__ int place_choices(PlacesMemory<N>& memory, const NarrowTilesArgs& args, int row_tiles,
                                             int num_reserved, ReservedTile* reserved) {
  constexpr int kEmpty = 1 << 20;  // experts without tokens are counted in the upper bits of the same sum
  Choices& choices = memory.choices;
  mark(choices, args.experts, args.num_tokens, args.num_chosen, args.num_experts);
  const int expert = threadIdx.x, count = expert < kMaxExperts ? count_tokens(choices, expert) : 0;
  const int first = sum_of_lower(count, choices.totals);
  const bool is_empty = expert < num_reserved && count == 0;
  const int left = (count + N - 1) / N - (expert < num_reserved && count > 0 ? 1 : 0);
  const int before = sum_of_lower(left * row_tiles + (is_empty ? kEmpty : 0), memory.totals);
  if (expert < kMaxExperts) {
    memory.first_token[expert] = choices.first[expert] = first;
    memory.first_tile[expert] = before;
    if (expert == kMaxExperts - 1) {
      memory.first_token[kMaxExperts] = first + count;
      memory.first_tile[kMaxExperts] = before + left * row_tiles;
    }
  }
  __syncthreads();
  const int all = memory.first_tile[kMaxExperts];
  const int to_reserved = memory.first_tile[reserved->is_reserved ? reserved->expert : kMaxExperts] / kEmpty;
  reserved->is_chosen =
      reserved->is_reserved && memory.first_token[reserved->expert + 1] > memory.first_token[reserved->expert];
  reserved->num_before = to_reserved * row_tiles + (reserved->is_reserved ? 0 : blockIdx.x - num_reserved * row_tiles);
  reserved->num_before += reserved->is_reserved ? blockIdx.x % row_tiles : 0;
  reserved->num_unreserved = all / kEmpty * row_tiles + gridDim.x - num_reserved * row_tiles;
  return all % kEmpty;
}

// Finds tile number `tile` of those that are left.
template <int N>
__device__ __forceinline__ ExpertTile find_left_tile(const PlacesMemory<N>& memory, int tile, int rows_each,
                                                     int num_reserved) {
  constexpr int kEmpty = 1 << 20;
  int expert = 0;
#pragma unroll
  for (int step = kMaxExperts / 2; step > 0; step /= 2) {
    if (memory.first_tile[expert + step] % kEmpty <= tile) expert += step;
  }
  ExpertTile found;
  const int skipped = expert < num_reserved ? N : 0, first = memory.first_token[expert] + skipped;
  const int index = tile - memory.first_tile[expert] % kEmpty;
  found.expert = expert;
  found.last_token = memory.first_token[expert + 1];
  const int token_tiles = (found.last_token - first + N - 1) / N;
  found.token = first + index % token_tiles * N;
  found.row = index / token_tiles * rows_each;
  return found;
}

// Returns, to each of the first N lanes, the token of a tile.
template <int N>
__device__ __forceinline__ int token_of_lane(const PlacesMemory<N>& memory, const ExpertTile& at) {
  int rank = at.token - memory.first_token[at.expert] + static_cast<int>(threadIdx.x % 32), word = 0;
  const auto& words = memory.choices.tokens[at.expert];
  if (at.token + static_cast<int>(threadIdx.x % 32) >= at.last_token) return 0;
  for (; rank >= __popc(words[word]); ++word) rank -= __popc(words[word]);
  uint32_t bits = words[word];
  for (; rank > 0; --rank) bits &= bits - 1;
  return 32 * word + __ffs(bits) - 1;
}

// Copies the tokens of a block's tiles and their scales to shared memory with one warp, as the copy engine would if
// they lay in order, and stores the places of some tokens' choices. `find(i, &tile)` finds the block's tile i.
template <int N, class W, class Find>
__device__ __forceinline__ void copy_tokens(PlacesMemory<N>& memory, const NarrowTilesArgs& args, int blocks,
                                            uint32_t full, uint32_t empty, Find find) {
  static_assert(N <= 32);
  const int lane = threadIdx.x % 32, row_bytes = args.columns * 128 / W::kBlockColumns;
  const uint8_t* rows = static_cast<const uint8_t*>(args.tokens);
  int chunk = 0, waiting = -1;  // the chunk whose copies are not known to be complete
  uint32_t parity = 1;
  auto signal = [&](int which) {
    fence_shared_before_copies();
    __syncwarp();
    if (lane == 0) barrier_arrive(full + 8 * which);
  };
  ExpertTile at;
#pragma unroll 1
  for (int t = 0; find(t, &at); ++t) {
    const int num_tokens = at.last_token - at.token, mine = token_of_lane<N>(memory, at);
#pragma unroll 1
    for (int first_group = 0; first_group < blocks; first_group += kGroups) {
      barrier_wait(empty + 8 * chunk, parity);
      const uint32_t to = shared_address(memory.tokens[chunk]);
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const int row = lane / 8 + 4 * i, piece = lane % 8;
        const int token = __shfl_sync(0xffffffffu, mine, row);
        const uint8_t* from = rows + static_cast<size_t>(token) * row_bytes + piece * 16;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const int group = first_group + g;
          const bool is_real = row < num_tokens && group < blocks;
          copy_16(to + (g * N + row) * 128 + (piece ^ row % 8) * 16, from + (is_real ? group * 128 : 0),
                  is_real ? 16 : 0);
        }
      }
#pragma unroll
      for (int i = 0; i < (W::kIsQuantised ? kGroups * N / 32 : 0); ++i) {
        const int row = (lane + 32 * i) % N, g = (lane + 32 * i) / N;
        const int token = __shfl_sync(0xffffffffu, mine, row);
        const bool is_real = row < num_tokens && first_group + g < blocks;
        const size_t from = is_real ? static_cast<size_t>(first_group + g) * args.stride + token : 0;
        copy_4(shared_address(memory.token_scales[chunk][g] + row), args.token_scales + from, is_real ? 4 : 0);
      }
      commit_copies();
      if (waiting >= 0) {
        wait_for_copies<1>();
        signal(waiting);
      }
      waiting = chunk;
      if (++chunk == kChunks<N>) chunk = 0, parity ^= 1;
    }
  }
  wait_for_copies<0>();
  if (waiting >= 0) signal(waiting);
  // The places of some tokens' choices, for the sum of a token's experts.
#pragma unroll 1
  for (int token = blockIdx.x; token < args.num_tokens; token += gridDim.x) {
#pragma unroll 1
    for (int i = lane; i < args.num_chosen; i += 32) {
      const int choice = token * args.num_chosen + i, chosen = args.experts[choice];
      const bool is_here = chosen >= 0 && chosen < args.num_experts;
      args.places[choice] = is_here ? memory.choices.first[chosen] + rank_of(memory.choices, chosen, token) : -1;
    }
  }
}

template <bool kIsDown, int N, class W, bool kPlaces = false>
__global__ void __launch_bounds__(narrow_threads(kPlaces), 1)
    narrow_tiles_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap input,
                        const __grid_constant__ CUtensorMap input_scales,
                        const __grid_constant__ NarrowTilesArgs args) {
  using Memory = std::conditional_t<kPlaces, PlacesMemory<N>, NarrowTilesMemory<N>>;
  constexpr bool kGathers = kPlaces && !kIsDown;
  constexpr int kRows = kIsDown ? 2 * kHalfRows : kHalfRows;  // of the output
  constexpr int kTokenBytes = kGroups * (N * 128 + (W::kIsQuantised ? (N + kMoreScales) * 4 : 0));
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& memory = *reinterpret_cast<Memory*>(shared);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t full = shared_address(memory.full), empty = shared_address(memory.empty);
  const uint32_t tokens_full = shared_address(memory.tokens_full), tokens_empty = shared_address(memory.tokens_empty);
  if (threadIdx.x == kNarrowConsumers) {
    prefetch_map(&weights);
    prefetch_map(&input);
    if (W::kIsQuantised) prefetch_map(&input_scales);
    for (int s = 0; s < kUnits<N>; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, kWarps / 2);
    }
    for (int s = 0; s < kChunks<N>; ++s) {
      barrier_init(tokens_full + 8 * s, 1);
      barrier_init(tokens_empty + 8 * s, kWarps);
    }
    barrier_init_fence();
  }
  const int row_tiles = (args.rows + kRows - 1) / kRows;
  const int blocks = (args.columns + W::kBlockColumns - 1) / W::kBlockColumns;
  const int units = (blocks + kGroups - 1) / kGroups * 4;  // of a tile
  const uint64_t policy = evict_first_policy();
  const int to_second_row = kIsDown ? kHalfRows : args.rows;
  auto row_of = [&](int expert, int row) { return args.first_row + expert * args.rows * (kIsDown ? 1 : 2) + row; };
  auto scales_of = [&](int row) {
    return TileScales(args.scales, row, row + to_second_row, W::kIsQuantised ? blocks : 0);
  };
  // Fetches unit i of the tile whose first row is `row`.
  auto fetch_unit = [&](int row, const TileScales& scales, int i, int to_unit) {
    const int first_group = i / 4 * kGroups;
    const uint32_t to = shared_address(memory.units[to_unit]), barrier = full + 8 * to_unit;
    if constexpr (W::kIsQuantised) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float2 of_rows = scales.of(args.scales, min(first_group + g, blocks - 1));
        if (lane == 0) memory.scales[to_unit][g] = i % 4 < 2 ? of_rows.x : of_rows.y;
      }
    }
    if (lane == 0) {
      barrier_expect_bytes(barrier, kUnitBytes);
      copy_tile(to, &weights, row + (i % 4 < 2 ? 0 : to_second_row) + i % 2 * kUnitRows, first_group, barrier, policy);
    }
  };
  ReservedTile reserved = {};
  int num_reserved = 0, num_early = 0;  // experts, and units that are fetched before the wait
  if constexpr (kPlaces) {
    if constexpr (!kIsDown) num_reserved = min(static_cast<int>(gridDim.x) / row_tiles, args.num_experts);
    reserved.expert = blockIdx.x / row_tiles, reserved.row = blockIdx.x % row_tiles * kRows;
    reserved.is_reserved = reserved.expert < num_reserved;
    // In bfloat16 only as many as have been measured.
    if (reserved.is_reserved) num_early = min(W::kIsQuantised ? kUnits<N> : 4, units);
    clear(memory.choices);
    if (warp == kWarps && num_early > 0) {
      const int row = row_of(reserved.expert, reserved.row);
      const TileScales scales = scales_of(row);
#pragma unroll 1
      for (int i = 0; i < num_early; ++i) fetch_unit(row, scales, i, i);
    }
  }
  if (kIsDown) {
    let_next_kernel_start();
  } else {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  int all_tiles;
  if constexpr (kPlaces) {
    all_tiles = place_choices<N>(memory, args, row_tiles, num_reserved, &reserved);
  } else {
    all_tiles = count_tiles<N>(memory, args.first, row_tiles);
  }
  // Finds the block's tile i, given an earlier one.
  auto find = [&](int i, ExpertTile* at) {
    if constexpr (kPlaces) {
      if (i == 0 && reserved.is_chosen) {
        const int* first = memory.first_token + reserved.expert;
        *at = {reserved.expert, first[0], first[1], reserved.row};
        return true;
      }
      const int number = reserved.number(i);
      if (number < all_tiles) *at = find_left_tile<N>(memory, number, kRows, num_reserved);
      return number < all_tiles;
    } else {
      const int number = blockIdx.x + i * gridDim.x;
      if (number < all_tiles) find_tile<N>(memory, number, kRows, at);
      return number < all_tiles;
    }
  };
  const bool is_dropped = num_early > 0 && !reserved.is_chosen;  // what was fetched before the wait
  ExpertTile at;

  if constexpr (kGathers) {
    if (warp == kWarps + 1) return copy_tokens<N, W>(memory, args, blocks, tokens_full, tokens_empty, find);
  }
  if (warp > kWarps) return;
  if (warp == kWarps) {
    const uint64_t keep = evict_last_policy();
    int unit = 0, chunk = 0;
    uint32_t parity = 1, tokens_parity = 1;
    bool is_waiting = kIsDown;
    if (is_dropped) {
      unit = num_early % kUnits<N>;
      if (unit == 0) parity ^= 1;
      num_early = 0;
    }
#pragma unroll 1
    for (int t = 0; find(t, &at); ++t) {
      const int row = row_of(at.expert, at.row);
      const TileScales scales = scales_of(row);
      if (is_waiting) {
        num_early = min(kUnits<N>, units);
#pragma unroll 1
        for (int i = 0; i < num_early; ++i) fetch_unit(row, scales, i, i);
        wait_for_previous_kernel();
        is_waiting = false;
      }
#pragma unroll 1
      for (int i = 0; i < units; ++i) {
        if (!kGathers && i % 4 == 0) {
          if (lane == 0) {
            const uint32_t barrier = tokens_full + 8 * chunk;
            barrier_wait(tokens_empty + 8 * chunk, tokens_parity);
            barrier_expect_bytes(barrier, kTokenBytes);
            copy_tile(shared_address(memory.tokens[chunk]), &input, at.token, i / 4 * kGroups, barrier, keep);
            if (W::kIsQuantised) {
#pragma unroll
              for (int g = 0; g < kGroups; ++g) {
                copy_box(shared_address(memory.token_scales[chunk][g]), &input_scales, first_scale(at.token),
                         i / 4 * kGroups + g, 0, barrier);
              }
            }
          }
          if (++chunk == kChunks<N>) chunk = 0, tokens_parity ^= 1;
        }
        if (i >= num_early) {
          if (lane == 0) barrier_wait(empty + 8 * unit, parity);
          fetch_unit(row, scales, i, unit);
        }
        __syncwarp();
        if (++unit == kUnits<N>) unit = 0, parity ^= 1;
      }
      num_early = 0;
    }
    if (is_waiting) wait_for_previous_kernel();
    return;
  }

  const int group = warp / 4, first_row = 64 * group + 16 * (warp % 4);  // of the warp, of each 128 rows
  int unit = group, chunk = 0, buffer = 0;
  uint32_t parity = 0, tokens_parity = 0;
  float sums[2][N / 2];
  if constexpr (kGathers) {
    if (is_dropped) {
#pragma unroll 1
      for (; unit < num_early; unit += 2) {
        barrier_wait(full + 8 * unit, parity);
        if (lane == 0) barrier_arrive(empty + 8 * unit);
      }
      if (unit >= kUnits<N>) unit -= kUnits<N>, parity ^= 1;
    }
  }
#pragma unroll 1
  for (int t = 0; find(t, &at); ++t) {
#pragma unroll 1
    for (int first_group = 0; first_group < blocks; first_group += kGroups) {
      barrier_wait(tokens_full + 8 * chunk, tokens_parity);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        barrier_wait(full + 8 * unit, parity);
        add_unit<W, N>(sums[m], memory, unit, chunk, kGathers ? 0 : at.token, blocks - first_group, first_group == 0);
        __syncwarp();  // all lanes have read the scales
        if (lane == 0) barrier_arrive(empty + 8 * unit);
        if ((unit += 2) >= kUnits<N>) unit -= kUnits<N>, parity ^= 1;
      }
      if (lane == 0) barrier_arrive(tokens_empty + 8 * chunk);
      if (++chunk == kChunks<N>) chunk = 0, tokens_parity ^= 1;
    }
    const int num_tokens = at.last_token - at.token, row = at.row + first_row;
    const size_t first_number = static_cast<size_t>(at.token) * args.rows + row;
    if constexpr (kIsDown) {
      bf16* to = static_cast<bf16*>(args.out) + first_number;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        store_rows<N>(to + m * kHalfRows, args.rows, sums[m], num_tokens, args.rows - row - m * kHalfRows);
      }
    } else {
      // A lane has rows lane / 4 and 8 further of tokens 2 * (lane % 4) and the next one, of each 8.
      float values[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) values[i] = silu(sums[0][i]) * sums[1][i];
      if constexpr (W::kIsQuantised) {
        float inverse[N / 4];
        auto& highest = memory.highest[buffer];
        buffer ^= 1;
#pragma unroll
        for (int t = 0; t < N / 4; ++t) {
          const float* of_token = values + t / 2 * 4 + t % 2;
          float most = fmaxf(fabsf(of_token[0]), fabsf(of_token[2]));
#pragma unroll
          for (int lanes = 4; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
          if (lane < 4) highest[warp][t / 2 * 8 + 2 * lane + t % 2] = most;
        }
        sync_threads(1, kNarrowConsumers);
        auto scale_of_token = [&](int token) {
          float most = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) most = fmaxf(most, highest[w][token]);
          return e4m3_scale(most);
        };
#pragma unroll
        for (int t = 0; t < N / 4; ++t) inverse[t] = 1.0f / scale_of_token(t / 2 * 8 + 2 * (lane % 4) + t % 2);
        store_rows<N>(static_cast<uint8_t*>(args.out) + first_number, args.rows, values, inverse, num_tokens);
        const int token = threadIdx.x;
        if (token < N && token < num_tokens) {
          const size_t place = at.token + token;
          args.out_scales[static_cast<size_t>(at.row / kFp8Columns) * args.stride + place] =
              scale_of_token(token) * (kPlaces ? 1.0f : args.share_of[place]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
          const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
          if (!kPlaces) values[i] *= token < num_tokens ? args.share_of[at.token + token] : 0.0f;
        }
        store_rows<N>(static_cast<bf16*>(args.out) + first_number, args.rows, values, num_tokens, args.rows - row);
      }
    }
  }
}

}  // namespace experts
}  // namespace meshserve
