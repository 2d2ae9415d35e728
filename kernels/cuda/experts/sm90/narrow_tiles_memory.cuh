// The memory of the kernels of narrow tiles (narrow_tiles.cuh), and how in a decode step these find the slots
// of the choices, and the tokens of their tiles, by themselves.
//
// Every block derives all slots from the choices. One warp copies each tile's tokens to shared memory from where the
// router has left them, so that no kernel puts tokens in order. gate_up does not wait for the choices before it fetches
// its first weights: each block begins with a fixed expert's first tile, which is dropped if no token chose this
// expert.
#pragma once
#include "common/sm90/ptx.cuh"
#include "experts/row_products.cuh"
#include "experts/sm90/wide_tiles.cuh"

namespace meshserve {
namespace experts {

constexpr int kNarrowConsumers = 256;
constexpr int narrow_threads(bool slots) { return slots ? 320 : 288; }
constexpr int kHalfRows = 128;  // half of a tile's weights: gate's or up's, or the lower or upper rows of down
constexpr int kUnitRows = 64, kGroups = 2, kUnitBytes = kGroups * kUnitRows * 128;
constexpr int kFp8Columns = 128;   // that share a scale
constexpr int kFp8LaneScales = 2;  // times 128 columns whose scales a lane of a warp holds
constexpr int kFp8MostColumns = 32 * kFp8LaneScales * kFp8Columns;
template <int N>  // in shared memory
constexpr int kUnits = N <= 16   ? 12
                       : N <= 32 ? 10
                                 : 8;
template <int N>
constexpr int kChunks = N <= 32 ? 3 : 2;  // chunks of tokens
// Units that are in flight at a time before the wait: what other blocks read to choose queues behind them.
constexpr int kEarlyInFlight = 3;
constexpr int kLaterUnits = 4;  // that are asked for in the L2 meanwhile

// A copy must begin at a multiple of 16 bytes, so the scales of a tile's tokens begin up to 3 before them.
constexpr int kMoreScales = 4;
__device__ __forceinline__ int first_scale(int token) { return token / kMoreScales * kMoreScales; }

struct NarrowTilesArgs {
  const int* first;       // [kMaxExperts + 1]: of each expert's tokens
  const float* share_of;  // for each slot
  void* out;              // [slots, rows]: e4m3 of gate_up with 8-bit weights, else bf16
  float* out_scales;      // scales of e4m3 [rows / 128, stride]
  Scales scales;          // scales of 8-bit weights
  int rows, columns;      // rows of the output: an expert is [2, rows, columns] or [rows, columns]
  int first_row;          // the layer's first row in the stack of all layers
  int stride;             // the stride of out_scales
  bool is_permuted;       // for gate_up's wide tiles: whether `first` and `share_of` are written before it may start
  // With kPermutes:
  const int* experts;         // [T, k]: the choices
  const void* tokens;         // gate_up: the normed tokens [T, columns]: e4m3 with 8-bit weights, else bf16
  const float* token_scales;  // scales of e4m3 [columns / 128, stride]
  int* slots;                 // gate_up: of each choice, written [T, k]
  int num_tokens, num_chosen, num_experts;
};

template <int N>
struct NarrowTilesMemory {
  uint8_t units[kUnits<N>][kUnitBytes];
  uint8_t tokens[kChunks<N>][kGroups * N * 128];
  alignas(128) float token_scales[kChunks<N>][kGroups][(N + kMoreScales + 31) / 32 * 32];
  float scales[kUnits<N>][kGroups];
  float highest[2][kWarps][N];  // over a warp's rows, for each token; two, so that one barrier a tile suffices
  uint64_t full[kUnits<N>], empty[kUnits<N>];
  uint64_t tokens_full[kChunks<N>], tokens_empty[kChunks<N>];
  int first_tile[kMaxExperts + 1], first_token[kMaxExperts + 1];
  int totals[kWarps];
};
template <int N>
struct PermutingMemory : NarrowTilesMemory<N> {
  Choices choices;
  volatile bool is_released;  // whether the choices are there
};

// Experts without tokens are counted in the upper bits of sums of tiles.
constexpr int kEmptyExpert = 1 << 20;

// The tiles of a block of gate_up that finds its choices by itself. Experts' first tiles of tokens are reserved for the
// first blocks, in order; tiles that are left have numbers in order of experts. A block takes its reserved tile, or if
// no token chose that expert, one of the first that are left, and then every gridDim-th of the others.
struct ReservedTile {
  int expert, row;     // the reserved tile's
  bool is_reserved;    // for this block
  bool is_chosen;      // whether tokens chose the expert
  int num_before;      // lower blocks that have no tile reserved for them
  int num_unreserved;  // by all blocks

  __device__ __forceinline__ int number(int i) const {  // the number of the block's tile i among those left
    if (i == 0) return num_before;
    return num_unreserved + blockIdx.x + (i - 1) * gridDim.x;
  }
  // Returns how many units fewer than others a block with a tile less has in flight, and so less of the bandwidth: then
  // all blocks end at the same time.
  __device__ __forceinline__ int fewer_units(int all_tiles, int num_units) const {
    const int left = all_tiles - num_unreserved, blocks = gridDim.x, remainder = left % blocks;
    if (left <= 0 || remainder == 0 || static_cast<int>(blockIdx.x) < remainder) return 0;
    return num_units / (left / blocks + 2);
  }
};

// Computes the first token of each expert and the first of its tiles that are left. Of the first `num_reserved`
// experts, the first tiles are not among these. The consumers call it.
template <int N>
__device__ __forceinline__ void assign_slots(PermutingMemory<N>& memory, const NarrowTilesArgs& args, int row_tiles,
                                             int num_reserved) {
  Choices& choices = memory.choices;
  auto sync = [] { sync_threads(1, kNarrowConsumers); };
  mark(choices, args.experts, args.num_tokens, args.num_chosen, args.num_experts, sync);
  static_assert(kNarrowConsumers == kMaxExperts);
  const int expert = threadIdx.x, count = count_tokens(choices, expert);
  const int first = sum_of_lower(count, choices.totals, sync);
  const bool is_empty = expert < num_reserved && count == 0;
  const int left = (count + N - 1) / N - (expert < num_reserved && count > 0 ? 1 : 0);
  const int before = sum_of_lower(left * row_tiles + (is_empty ? kEmptyExpert : 0), memory.totals, sync);
  memory.first_token[expert] = choices.first[expert] = first;
  memory.first_tile[expert] = before;
  if (expert == kMaxExperts - 1) {
    memory.first_token[kMaxExperts] = first + count;
    memory.first_tile[kMaxExperts] = before + left * row_tiles;
  }
}

// Completes `reserved` when all choices have slots, and returns how many tiles are left.
template <int N>
__device__ __forceinline__ int count_left_tiles(const PermutingMemory<N>& memory, int row_tiles, int num_reserved,
                                                ReservedTile* reserved) {
  const int all = memory.first_tile[kMaxExperts];
  const int to_reserved = memory.first_tile[reserved->is_reserved ? reserved->expert : kMaxExperts] / kEmptyExpert;
  reserved->is_chosen =
      reserved->is_reserved && memory.first_token[reserved->expert + 1] > memory.first_token[reserved->expert];
  reserved->num_before = to_reserved * row_tiles + (reserved->is_reserved ? 0 : blockIdx.x - num_reserved * row_tiles);
  reserved->num_before += reserved->is_reserved ? blockIdx.x % row_tiles : 0;
  reserved->num_unreserved = all / kEmptyExpert * row_tiles + gridDim.x - num_reserved * row_tiles;
  return all % kEmptyExpert;
}

// Finds tile number `tile` of those that are left.
template <int N>
__device__ __forceinline__ ExpertTile find_left_tile(const PermutingMemory<N>& memory, int tile, int rows_each,
                                                     int num_reserved) {
  int expert = 0;
#pragma unroll
  for (int step = kMaxExperts / 2; step > 0; step /= 2) {
    if (memory.first_tile[expert + step] % kEmptyExpert <= tile) expert += step;
  }
  ExpertTile found;
  const int skipped = expert < num_reserved ? N : 0, first = memory.first_token[expert] + skipped;
  const int index = tile - memory.first_tile[expert] % kEmptyExpert;
  found.expert = expert;
  found.last_token = memory.first_token[expert + 1];
  const int token_tiles = (found.last_token - first + N - 1) / N;
  found.token = first + index % token_tiles * N;
  found.row = index / token_tiles * rows_each;
  return found;
}

// Returns, to each of the first N lanes, the token of a tile.
template <int N>
__device__ __forceinline__ int token_of_lane(const PermutingMemory<N>& memory, const ExpertTile& at) {
  int rank = at.token - memory.first_token[at.expert] + static_cast<int>(threadIdx.x % 32), word = 0;
  const auto& words = memory.choices.tokens[at.expert];
  if (at.token + static_cast<int>(threadIdx.x % 32) >= at.last_token) return 0;
  for (; rank >= __popc(words[word]); ++word) rank -= __popc(words[word]);
  uint32_t bits = words[word];
  for (; rank > 0; --rank) bits &= bits - 1;
  return 32 * word + __ffs(bits) - 1;
}

// Copies the tokens of a block's tiles and their scales to shared memory with one warp, as the copy engine would if
// they lay in order, and stores the slots of some tokens' choices. `find(i, &tile)` finds the block's tile i.
template <int N, class W, class Find>
__device__ __forceinline__ void copy_tokens(PermutingMemory<N>& memory, const NarrowTilesArgs& args, int blocks,
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
      for (int i = 0; i < (W::kIsQuantized ? kGroups * N / 32 : 0); ++i) {
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
  // The slots of some tokens' choices, for the sum of a token's experts.
#pragma unroll 1
  for (int token = blockIdx.x; token < args.num_tokens; token += gridDim.x) {
#pragma unroll 1
    for (int i = lane; i < args.num_chosen; i += 32) {
      const int choice = token * args.num_chosen + i, chosen = args.experts[choice];
      const bool is_here = chosen >= 0 && chosen < args.num_experts;
      args.slots[choice] = is_here ? memory.choices.first[chosen] + rank_of(memory.choices, chosen, token) : -1;
    }
  }
}

}  // namespace experts
}  // namespace meshserve
