// The experts of a step of few tokens, for all GPUs since Ampere: two kernels, for gate and up and for down.
//
// Reading the weights is the limit. A warp copies 64 bytes of 16 rows at a time to shared memory, several such chunks
// ahead of their use and across the ends of its units of work; each lane copies what it multiplies itself, so that the
// warp never waits for others. Weights are the left operand of the matrix instructions, up to 8 tokens of one expert
// the right one. Every block finds out which tokens chose which expert, and reads no other expert.
//
//   gate and up   a unit is a tile of tokens and 8 rows of each matrix, which are the two rows that a lane holds. The
//                 warps of a block share the columns of a unit and add up their sums.
//   down          a block has 16 rows, for all tiles. A unit is a warp's: a tile and all columns, or half of them where
//                 tiles are few. The block then adds up the experts of each token.
//
// All sums have an order that depends on shapes alone, so a token's result does not depend on the others.
#pragma once
#include "experts/permutation.cuh"
#include "experts/sm80/formats.cuh"

namespace meshserve::experts::sm80 {

constexpr int kFewTokens = 64, kFewChoices = 512;  // at most
constexpr int kTileTokens = 8;
constexpr int kDepth = 6;          // chunks of a warp in shared memory
constexpr int kFewDownTiles = 16;  // below which two warps share the columns of a tile
constexpr int kUnitRows = 8, kDownRows = 16;
constexpr int kNoSlot = 0xFFFF;

struct FewArgs {
  const bf16* x;  // [T, D], or for down the activations [slots, F]
  Stack weights;
  const int* experts;   // [T, k]
  const float* shares;  // [T, k]
  bf16* out;            // activations [slots, F], or of down [T, D]
  int num_tokens, num_chosen, num_experts;
  int layer;
  int rows, columns;  // of a matrix
};

struct Tile {
  int expert, first, count;  // slots first to first + count - 1
};

// The tiles of a step: up to 8 consecutive slots of one expert each.
struct FewTiles {
  Choices choices;
  uint32_t tiles[kFewChoices];
  uint16_t order[kFewChoices];  // the choice of each slot
  uint16_t slots[kFewChoices];  // the slot of each choice
  int num_tiles;

  __device__ __forceinline__ Tile at(int tile) const {
    const uint32_t packed = tiles[tile];
    return {static_cast<int>(packed & 255), static_cast<int>(packed >> 12), static_cast<int>(packed >> 8 & 15)};
  }
};

__device__ __forceinline__ uint32_t packed_tile(int expert, int first, int count) {
  return static_cast<uint32_t>(expert | count << 8 | first << 12);
}

// Finds the tiles of up to 32 choices with one warp: a choice's slot is the number of those before it, in order of
// experts, then tokens.
__device__ __forceinline__ void find_tiles_of_warp(FewTiles& found, const FewArgs& args) {
  constexpr uint32_t kNowhere = 0xFFFF;
  const int lane = threadIdx.x % 32, num_choices = args.num_tokens * args.num_chosen;
  const int chosen = lane < num_choices ? __ldg(args.experts + lane) : -1;
  const bool is_here = chosen >= 0 && chosen < args.num_experts;
  const uint32_t expert = is_here ? static_cast<uint32_t>(chosen) : kNowhere;
  const uint32_t same = __match_any_sync(~0u, expert);
  const int rank = __popc(same & ((1u << lane) - 1)), count = __popc(same);
  const int num_tiles = is_here && rank == 0 ? (count + kTileTokens - 1) / kTileTokens : 0;
  int first = 0, tile = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const uint32_t other = __shfl_sync(~0u, expert | static_cast<uint32_t>(num_tiles) << 16, i);
    if ((other & 0xFFFF) < expert) ++first, tile += other >> 16;
  }
  if (is_here) found.order[first + rank] = static_cast<uint16_t>(lane);
  if (lane < num_choices) found.slots[lane] = static_cast<uint16_t>(is_here ? first + rank : kNoSlot);
  for (int i = 0; i < num_tiles; ++i) {
    const int done = i * kTileTokens;
    found.tiles[tile + i] = packed_tile(chosen, first + done, min(kTileTokens, count - done));
  }
  const int total = __reduce_add_sync(~0u, num_tiles);
  if (lane == 0) found.num_tiles = total;
}

__device__ __forceinline__ void find_tiles(FewTiles& found, const FewArgs& args) {
  if (args.num_tokens * args.num_chosen <= 32) {
    if (threadIdx.x < 32) find_tiles_of_warp(found, args);
    __syncthreads();
    return;
  }
  Choices& choices = found.choices;
  clear(choices);
  arrange(choices, args.experts, args.num_tokens, args.num_chosen, args.num_experts);
  for (int i = threadIdx.x; i < args.num_tokens * args.num_chosen; i += kThreads) {
    const int expert = __ldg(args.experts + i);
    int slot = kNoSlot;
    if (expert >= 0 && expert < args.num_experts) {
      slot = choices.first[expert] + rank_of(choices, expert, i / args.num_chosen);
      found.order[slot] = static_cast<uint16_t>(i);
    }
    found.slots[i] = static_cast<uint16_t>(slot);
  }
  const int expert = threadIdx.x, count = count_tokens(choices, expert), first = choices.first[expert];
  const int num_tiles = (count + kTileTokens - 1) / kTileTokens, before = sum_of_lower(num_tiles, choices.totals);
  for (int i = 0; i < num_tiles; ++i) {
    const int done = i * kTileTokens;
    found.tiles[before + i] = packed_tile(expert, first + done, min(kTileTokens, count - done));
  }
  if (expert == kThreads - 1) found.num_tiles = before + num_tiles;
  __syncthreads();
}

// A warp's part of a unit: chunks first, first + step, .. of 16 rows, of which a lane has two.
struct Part {
  size_t rows[2];
  int first, step, count;
};

template <class W>
constexpr int kChunkColumns = 64 * 8 / W::kBits;
template <class W>
constexpr int kPieces = kChunkColumns<W> / 32;  // of 8 columns, that a lane has of a chunk
template <class W>
constexpr int kGroups = W::kIsScaled && W::kSpan < kChunkColumns<W> ? kChunkColumns<W> / W::kSpan : 1;  // of a chunk

struct Ring {
  uint4 chunks[kDepth][kWarps][2][32];  // lane by lane
};

// The weights of a warp on their way to shared memory, for units `unit`, `unit` + `stride`, ..
template <class W, class PartOf>
class WeightStream {
 public:
  __device__ __forceinline__ WeightStream(Ring& ring, const FewArgs& args, PartOf part_of, int unit, int stride,
                                          int num_units)
      : ring_(shared_address(ring.chunks[0][threadIdx.x / 32][0] + threadIdx.x % 32)),
        from_(args.weights.data + threadIdx.x % 4 * 16),
        row_bytes_(static_cast<size_t>(args.columns) * W::kBits / 8),
        part_of_(part_of),
        unit_(unit),
        stride_(stride),
        num_units_(num_units) {
    open();
#pragma unroll 1
    for (int i = 0; i < kDepth - 1; ++i) next();
  }

  // Begins the copy of the next chunk, if there is one.
  __device__ __forceinline__ void next() {
    if (unit_ < num_units_) {
      const uint32_t to = ring_ + filled_ * kChunkBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) copy_weights(to + half * 512, rows_[half], 16), rows_[half] += step_;
      if (++filled_ == kDepth) filled_ = 0;
      if (--left_ == 0) {
        unit_ += stride_;
        open();
      }
    }
    commit_copies();
  }

  // Waits for the oldest chunk: this lane's 16 bytes of each of its rows.
  __device__ __forceinline__ void take(uint32_t (&words)[2][4]) {
    wait_for_copies<kDepth - 2>();
    const uint32_t from = ring_ + taken_ * kChunkBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = load_shared(from + half * 512);
      words[half][0] = v.x, words[half][1] = v.y, words[half][2] = v.z, words[half][3] = v.w;
    }
    if (++taken_ == kDepth) taken_ = 0;
  }

 private:
  static constexpr uint32_t kChunkBytes = kWarps * 2 * 32 * 16;

  // Goes on to a unit of which the warp has a part.
  __device__ __forceinline__ void open() {
    for (; unit_ < num_units_; unit_ += stride_) {
      const Part part = part_of_(unit_);
      if (part.count <= 0) continue;
      left_ = part.count;
      step_ = part.step * 64;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows_[half] = from_ + part.rows[half] * row_bytes_ + static_cast<size_t>(part.first) * 64;
      }
      return;
    }
  }

  const uint32_t ring_;
  const uint8_t* const from_;
  const size_t row_bytes_;
  const PartOf part_of_;
  int unit_;
  const int stride_, num_units_;
  int filled_ = 0, taken_ = 0, left_ = 0, step_ = 0;
  const uint8_t* rows_[2] = {};
};

// Loads this lane's columns of a chunk of its token, in the order of the weights; zeros without a token.
template <class W>
__device__ __forceinline__ void load_token(uint4 (&pieces)[kPieces<W>], const bf16* token, int column, int lane) {
#pragma unroll
  for (int i = 0; i < kPieces<W>; ++i) {
    const int at = kGroups<W> > 1 ? 32 * i + lane % 4 * 8 : lane % 4 * (kChunkColumns<W> / 4) + 8 * i;
    pieces[i] = make_uint4(0, 0, 0, 0);
    if (token != nullptr) pieces[i] = *reinterpret_cast<const uint4*>(token + column + at);
  }
}

// Multiplies 8 columns of two rows of 8- or 4-bit weights, of which the lane holds 4 at a time.
template <class W, int kHalf>
__device__ __forceinline__ void multiply_half(float (&sums)[4], const uint32_t (&words)[2][4],
                                              const uint32_t (&zeros)[2], int piece, uint4 token) {
  uint32_t a[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (W::kHasZeros) {
      convert_int4<kHalf>(words[half][piece], zeros[half], a[half], a[2 + half]);
    } else {
      convert_e4m3(words[half][2 * piece + kHalf], a[half], a[2 + half]);
    }
  }
  const uint32_t low = kHalf == 0 ? token.x : token.z, high = kHalf == 0 ? token.y : token.w;
  multiply_16x8x16(sums, a, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}

// Adds the product of a chunk to `sums`: of this lane's two rows with tokens 2 * (lane % 4) and the next.
// `scale_rows` are the indices of the rows' first scales.
template <class W>
__device__ __forceinline__ void multiply_chunk(float (&sums)[4], uint32_t (&words)[2][4],
                                               const uint4 (&tokens)[kPieces<W>], const Scales& scales,
                                               const size_t (&scale_rows)[2], int column, int lane) {
  if constexpr (!W::kIsScaled) {
    static_cast<void>(scales), static_cast<void>(scale_rows), static_cast<void>(column), static_cast<void>(lane);
    const uint32_t first[4] = {words[0][0], words[1][0], words[0][1], words[1][1]};
    const uint32_t second[4] = {words[0][2], words[1][2], words[0][3], words[1][3]};
    multiply_16x8x16(sums, first, tokens[0].x, tokens[0].y);
    multiply_16x8x16(sums, second, tokens[0].z, tokens[0].w);
  } else {
    constexpr int kTogether = kPieces<W> / kGroups<W>;
    ScaleInFlight found[kGroups<W>][2];
    uint32_t zeros[kGroups<W>][2];
#pragma unroll
    for (int group = 0; group < kGroups<W>; ++group) {
      const int of_columns = scale_group(scales, column + group * (kChunkColumns<W> / kGroups<W>));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        found[group][half].load(scales, scale_rows[half] + of_columns);
        if (W::kHasZeros) zeros[group][half] = zero_pair(scales, scale_rows[half] + of_columns);
      }
    }
    if (kGroups<W> > 1) exchange_words(words[0], lane), exchange_words(words[1], lane);
#pragma unroll
    for (int group = 0; group < kGroups<W>; ++group) {
      float partial[4] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int piece = group * kTogether + i;
        multiply_half<W, 0>(partial, words, zeros[group], piece, tokens[piece]);
        multiply_half<W, 1>(partial, words, zeros[group], piece, tokens[piece]);
      }
      const float upper = found[group][0].value(scales), lower = found[group][1].value(scales);
      sums[0] += upper * partial[0], sums[1] += upper * partial[1];
      sums[2] += lower * partial[2], sums[3] += lower * partial[3];
    }
  }
}

struct FewGateUpMemory {
  Ring ring;
  float4 sums[2][kWarps][32];
  FewTiles tiles;
};

template <class W>
__global__ void __launch_bounds__(kThreads) few_gate_up_kernel(const __grid_constant__ FewArgs args) {
  extern __shared__ __align__(16) uint8_t shared_weights[];
  auto& memory = *reinterpret_cast<FewGateUpMemory*>(shared_weights);
  find_tiles(memory.tiles, args);
  const FewTiles& tiles = memory.tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_chunks = args.columns / kChunkColumns<W>, num_groups = args.rows / kUnitRows;
  const int num_units = tiles.num_tiles * num_groups;
  auto part_of = [&](int unit) {
    const int tile = unit / num_groups, row = (unit - tile * num_groups) * kUnitRows + lane / 4;
    const size_t matrix = static_cast<size_t>(args.layer) * args.num_experts + tiles.at(tile).expert;
    Part part;
    part.rows[0] = 2 * matrix * args.rows + row;  // of gate
    part.rows[1] = part.rows[0] + args.rows;      // of up
    part.first = warp, part.step = kWarps, part.count = (num_chunks - warp + kWarps - 1) / kWarps;
    return part;
  };
  WeightStream<W, decltype(part_of)> stream(memory.ring, args, part_of, blockIdx.x, gridDim.x, num_units);
  int turn = 0;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x, ++turn) {
    const Part part = part_of(unit);
    const Tile tile = tiles.at(unit / num_groups);
    const bf16* token = nullptr;
    if (lane / 4 < tile.count) {
      token = args.x + static_cast<size_t>(tiles.order[tile.first + lane / 4] / args.num_chosen) * args.columns;
    }
    size_t scale_rows[2] = {};
    if (W::kIsScaled) {
      scale_rows[0] = scale_row(args.weights.scales, part.rows[0]);
      scale_rows[1] = scale_row(args.weights.scales, part.rows[1]);
    }
    float sums[4] = {};
#pragma unroll 1
    for (int i = 0; i < part.count; ++i) {
      const int column = (part.first + i * part.step) * kChunkColumns<W>;
      uint4 pieces[kPieces<W>];
      uint32_t words[2][4];
      load_token<W>(pieces, token, column, lane);
      stream.take(words);
      stream.next();
      multiply_chunk<W>(sums, words, pieces, args.weights.scales, scale_rows, column, lane);
    }
    float4(&parts)[kWarps][32] = memory.sums[turn % 2];
    parts[warp][lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    __syncthreads();
    if (warp != turn % kWarps) continue;
    float4 total = parts[0][lane];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
      const float4 more = parts[i][lane];
      total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
    }
    const int row = unit % num_groups * kUnitRows + lane / 4, first = lane % 4 * 2;
    bf16* to = args.out + static_cast<size_t>(tile.first + first) * args.rows + row;
    if (first < tile.count) to[0] = __float2bfloat16(silu(total.x) * total.z);
    if (first + 1 < tile.count) to[args.rows] = __float2bfloat16(silu(total.y) * total.w);
  }
  wait_for_copies<0>();
}

// `results` has room for few_results(num_choices).
struct FewDownMemory {
  Ring ring;
  FewTiles tiles;
  float results[1][kDownRows];
};
// Returns the results [slots, 16] that the warps of a block leave for each other, at most.
__host__ __device__ constexpr int few_results(int num_choices) {
  return 2 * num_choices < kFewChoices ? 2 * num_choices : kFewChoices;
}
constexpr size_t few_down_bytes(int num_choices) {
  return sizeof(FewDownMemory) + sizeof(float) * kDownRows * few_results(num_choices);
}
static_assert(kFewDownTiles * kTileTokens * 2 <= kFewChoices, "two results for each slot of few tiles");
static_assert(sizeof(FewGateUpMemory) <= 99 << 10 && few_down_bytes(kFewChoices) <= 99 << 10,
              "what every GPU since Ampere offers a block");

// Grid: a block for each kDownRows rows.
template <class W>
__global__ void __launch_bounds__(kThreads) few_down_kernel(const __grid_constant__ FewArgs args) {
  extern __shared__ __align__(16) uint8_t shared_weights[];
  auto& memory = *reinterpret_cast<FewDownMemory*>(shared_weights);
  find_tiles(memory.tiles, args);
  const FewTiles& tiles = memory.tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_row = blockIdx.x * kDownRows;
  const int num_chunks = args.columns / kChunkColumns<W>, half = (num_chunks + 1) / 2;
  const int num_parts = tiles.num_tiles < kFewDownTiles ? 2 : 1, num_units = tiles.num_tiles * num_parts;
  auto part_of = [&](int unit) {
    const size_t matrix = static_cast<size_t>(args.layer) * args.num_experts + tiles.at(unit / num_parts).expert;
    Part part;
    part.rows[0] = matrix * args.rows + first_row + lane / 4;
    part.rows[1] = part.rows[0] + 8;
    part.step = 1, part.first = unit % num_parts * half;
    part.count = num_parts == 1 ? num_chunks : part.first == 0 ? half : num_chunks - half;
    return part;
  };
  WeightStream<W, decltype(part_of)> stream(memory.ring, args, part_of, warp, kWarps, num_units);
#pragma unroll 1
  for (int unit = warp; unit < num_units; unit += kWarps) {
    const Part part = part_of(unit);
    const Tile tile = tiles.at(unit / num_parts);
    const bf16* token = nullptr;
    if (lane / 4 < tile.count) token = args.x + static_cast<size_t>(tile.first + lane / 4) * args.columns;
    size_t scale_rows[2] = {};
    if (W::kIsScaled) {
      scale_rows[0] = scale_row(args.weights.scales, part.rows[0]);
      scale_rows[1] = scale_row(args.weights.scales, part.rows[1]);
    }
    float sums[4] = {}, of_first_half[4] = {};
#pragma unroll 1
    for (int i = 0; i < part.count; ++i) {
      const int column = (part.first + i) * kChunkColumns<W>;
      if (i == half) {  // the same sums as of two warps
#pragma unroll
        for (int j = 0; j < 4; ++j) of_first_half[j] = sums[j], sums[j] = 0.0f;
      }
      uint4 pieces[kPieces<W>];
      uint32_t words[2][4];
      load_token<W>(pieces, token, column, lane);
      stream.take(words);
      stream.next();
      multiply_chunk<W>(sums, words, pieces, args.weights.scales, scale_rows, column, lane);
    }
    const int first = tile.first + lane % 4 * 2, end = tile.first + tile.count;
    float (*to)[kDownRows] = memory.results + first * num_parts + unit % num_parts;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + i >= end) break;
      to[i * num_parts][lane / 4] = of_first_half[i] + sums[i];
      to[i * num_parts][lane / 4 + 8] = of_first_half[2 + i] + sums[2 + i];
    }
  }
  wait_for_copies<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < args.num_tokens * kDownRows; i += kThreads) {
    const int token = i / kDownRows, row = i % kDownRows;
    float sum = 0.0f;
    for (int j = 0; j < args.num_chosen; ++j) {
      const int choice = token * args.num_chosen + j, slot = tiles.slots[choice];
      if (slot == kNoSlot) continue;
      const float (*result)[kDownRows] = memory.results + slot * num_parts;
      sum += __ldg(args.shares + choice) * (num_parts == 1 ? result[0][row] : result[0][row] + result[1][row]);
    }
    args.out[static_cast<size_t>(token) * args.rows + first_row + row] = __float2bfloat16(sum);
  }
}

}  // namespace meshserve::experts::sm80
