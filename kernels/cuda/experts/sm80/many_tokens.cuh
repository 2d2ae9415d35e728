// The experts of a step of many tokens, for all GPUs since Ampere: products of tiles of one expert's tokens.
//
// A block computes 128 rows of weights for a tile of 32, 64 or 128 tokens: for gate and up, 64 rows of each in turns of
// 8, so that a lane holds both of a pair. Weights and tokens are copied to shared memory 64 columns at a time, some
// steps ahead of their use. Each of four warps has 32 of the rows, and in tiles of 128 tokens, four more have the other
// 64 tokens. There is a block for as many tiles as there may be; those beyond the last tile end at once.
//
// The sums over columns have the same order in all forms, so a token's result does not depend on the others.
#pragma once
#include "experts/sm80/order.cuh"

namespace meshserve::experts::sm80 {

constexpr int kStepColumns = 64, kBlockRows = 128, kRowWarps = 4;

template <class W_, int kTokenTiles_, int kTokenWarps_, int kStages_>
struct Form {
  using W = W_;
  static constexpr int kTokenTiles = kTokenTiles_;  // 16 tokens each, of a warp
  static constexpr int kTokenWarps = kTokenWarps_, kStages = kStages_;
  static constexpr int kTokens = 16 * kTokenTiles * kTokenWarps;
  static constexpr int kTileThreads = 32 * kRowWarps * kTokenWarps;
  static constexpr int kWeightBytes = kStepColumns * W::kBits / 8, kTokenBytes = 2 * kStepColumns;  // of a row
  static constexpr int kStageBytes = kBlockRows * kWeightBytes + kTokens * kTokenBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= 99 << 10, "what every GPU since Ampere offers a block");
};

struct TileArgs {
  const bf16* x;     // [T, D] in the order of the weights, or for down the activations [slots, F]
  const int* order;  // the choice of each slot, or null where x has a row for each
  Stack weights;
  const SlotTile* tiles;
  const int* num_tiles;
  bf16* out;  // activations [slots, F] in the order of the weights of down, or [slots, D]
  int num_chosen, num_experts, layer;
  int rows, columns;  // of a matrix
};

// Returns where 16 bytes of a row are in shared memory: in another order in each row, so that the matrix loads of a
// warp, which read the same columns of 8 rows, find them in different banks.
template <int kRowBytes>
__device__ __forceinline__ uint32_t place_of(int row, int chunk) {
  const int order = kRowBytes >= 128 ? row % 8 : kRowBytes == 64 ? row / 2 % 4 : row / 4 % 2;
  return row * kRowBytes + ((chunk ^ order) * 16);
}

// A row of a block, of which gate and up have 8 in turns, as a row of the expert's matrices.
template <bool kIsDown>
__device__ __forceinline__ int row_of(int block_row) {
  return kIsDown ? block_row : block_row / 16 * 8 + block_row % 8;
}

// Copies steps of columns to shared memory, in order.
template <class F, bool kIsDown>
class StepCopier {
 public:
  using W = typename F::W;

  // `weights` is the expert's first matrix, `first_row` the block's first row in it.
  __device__ __forceinline__ StepCopier(uint32_t stages, const TileArgs& args, const SlotTile& tile,
                                        const uint8_t* weights, int first_row)
      : stages_(stages), columns_(args.columns), num_steps_((args.columns + kStepColumns - 1) / kStepColumns) {
    const size_t row_bytes = static_cast<size_t>(args.columns) * W::kBits / 8;
    const int block_row = threadIdx.x / kWeightChunks, chunk = threadIdx.x % kWeightChunks;
    const int row = first_row + row_of<kIsDown>(block_row);
    const int of_up = !kIsDown && block_row / 8 % 2 ? args.rows : 0;
    weights_ = weights + (static_cast<size_t>(of_up) + row) * row_bytes + 16 * chunk;
    weight_stride_ = row_of<kIsDown>(kWeightRows) * row_bytes;
    num_weight_rows_ = args.rows - row;
    weights_to_ = place_of<F::kWeightBytes>(block_row, chunk);
    const int slot = threadIdx.x / kTokenChunks, token_chunk = threadIdx.x % kTokenChunks;
#pragma unroll
    for (int i = 0; i < kTokenRounds; ++i) {
      const int token = slot + i * kTokenRows;
      tokens_[i] = nullptr;
      if (token >= tile.count) continue;
      const int row_of_x =
          args.order == nullptr ? tile.first + token : __ldg(args.order + tile.first + token) / args.num_chosen;
      tokens_[i] = args.x + static_cast<size_t>(row_of_x) * args.columns + 8 * token_chunk;
    }
    any_ = args.x;
    tokens_to_ = kBlockRows * F::kWeightBytes + place_of<F::kTokenBytes>(slot, token_chunk);
  }

  // Begins the next copy, if there is one, as a group of copies.
  __device__ __forceinline__ void next() {
    if (step_ < num_steps_) {
      const int column = step_ * kStepColumns;
      const uint32_t to = stages_ + stage_ * F::kStageBytes;
      const bool has_weights = column + static_cast<int>(threadIdx.x) % kWeightChunks * (128 / W::kBits) < columns_;
      const bool has_tokens = column + static_cast<int>(threadIdx.x) % kTokenChunks * 8 < columns_;
#pragma unroll
      for (int i = 0; i < kWeightRounds; ++i) {
        const bool is_copied = has_weights && row_of<kIsDown>(i * kWeightRows) < num_weight_rows_;
        const uint8_t* from = weights_ + i * weight_stride_ + step_ * F::kWeightBytes;
        copy_weights(to + weights_to_ + i * kWeightRows * F::kWeightBytes,
                     is_copied ? static_cast<const void*>(from) : any_, is_copied ? 16 : 0);
      }
#pragma unroll
      for (int i = 0; i < kTokenRounds; ++i) {
        const bool is_copied = has_tokens && tokens_[i] != nullptr;
        copy_16(to + tokens_to_ + i * kTokenRows * F::kTokenBytes,
                is_copied ? static_cast<const void*>(tokens_[i] + column) : any_, is_copied ? 16 : 0);
      }
      ++step_;
      if (++stage_ == F::kStages) stage_ = 0;
    }
    commit_copies();
  }
  __device__ __forceinline__ int num_steps() const { return num_steps_; }

 private:
  static constexpr int kWeightChunks = F::kWeightBytes / 16, kWeightRows = F::kTileThreads / kWeightChunks;
  static constexpr int kWeightRounds = kBlockRows / kWeightRows;
  static constexpr int kTokenChunks = F::kTokenBytes / 16, kTokenRows = F::kTileThreads / kTokenChunks;
  static constexpr int kTokenRounds = F::kTokens / kTokenRows;
  static_assert(kWeightRows % 16 == 0 && kWeightRounds > 0, "a thread's rows are all of gate or all of up");
  static_assert(kTokenRows % 8 == 0 && kTokenRounds > 0, "the order of a row's bytes is the same in each round");

  const uint32_t stages_;
  const int columns_, num_steps_;
  const uint8_t* weights_;
  size_t weight_stride_;
  int num_weight_rows_;  // from this thread's first on
  uint32_t weights_to_, tokens_to_;
  const bf16* tokens_[kTokenRounds];
  const void* any_;  // for copies of nothing
  int step_ = 0, stage_ = 0;
};

// The sums of a warp: of 16 * kTokenTiles tokens and 32 rows. A lane holds tokens lane / 4 and the 8th behind it of
// each 16, and of each 8 rows, 2 * (lane % 4) and the next.
template <class F>
using Sums = float[F::kTokenTiles][4][4];

// The scales of a lane's rows.
template <class W>
class TileScales {
 public:
  // `row` returns the row of the stacked matrix of a warp's row.
  template <class RowOf>
  __device__ __forceinline__ TileScales(const Scales& scales, int lane, RowOf row) : scales_(scales) {
    if constexpr (W::kIsScaled) {
      first_ = scale_row(scales, row(0));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          at_[n][i] = static_cast<int>(scale_row(scales, row(8 * n + lane % 4 * 2 + i)) - first_);
        if (W::kHasZeros) zero_at_[n] = static_cast<int>(scale_row(scales, row(8 * n + lane / 4)) - first_);
      }
    } else {
      static_cast<void>(lane), static_cast<void>(row);
    }
  }
  __device__ __forceinline__ void load(int column) {
    const size_t at = first_ + scale_group(scales_, column);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      found_[n][0].load(scales_, at + at_[n][0]);
      found_[n][1].load(scales_, at + at_[n][1]);
    }
  }
  __device__ __forceinline__ void load_zeros(uint32_t (&zeros)[4], int column) const {
    const size_t at = first_ + scale_group(scales_, column);
#pragma unroll
    for (int n = 0; n < 4; ++n) zeros[n] = zero_pair(scales_, at + zero_at_[n]);
  }
  // Adds scaled sums, which become 0.
  template <class F>
  __device__ __forceinline__ void add(Sums<F>& sums, Sums<F>& partial) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float scale[2] = {found_[n][0].value(scales_), found_[n][1].value(scales_)};
#pragma unroll
      for (int m = 0; m < F::kTokenTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] += scale[i % 2] * partial[m][n][i], partial[m][n][i] = 0.0f;
      }
    }
  }

 private:
  const Scales& scales_;
  size_t first_ = 0;
  int at_[4][2] = {}, zero_at_[4] = {};
  ScaleInFlight found_[4][2];
};

// Adds the product of columns kFirst to kFirst + kCount - 1 of a step, in units of 16. `tokens` and `weights` are the
// addresses of this lane's rows in matrix loads.
template <class F, int kFirst, int kCount>
__device__ __forceinline__ void multiply_columns(Sums<F>& sums, uint32_t tokens, uint32_t weights, uint32_t token_order,
                                                 uint32_t weight_order, uint32_t token_half, uint32_t weight_half,
                                                 const uint32_t (&zeros)[4]) {
  using W = typename F::W;
  constexpr int kEach = 16 / W::kBits;  // units of 16 columns that a matrix load has, in two matrices: 1, 2 or 4
  uint32_t raw[2][4];
#pragma unroll
  for (int s = kFirst; s < kFirst + kCount; ++s) {
    uint32_t a[F::kTokenTiles][4];
#pragma unroll
    for (int m = 0; m < F::kTokenTiles; ++m) {
      load_matrices(a[m], tokens + 16 * m * F::kTokenBytes + (((2 * s + token_half) ^ token_order) * 16));
    }
    if (s % kEach == 0 || s == kFirst) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        load_matrices(raw[pair],
                      weights + 16 * pair * F::kWeightBytes + (((s / kEach * 2 + weight_half) ^ weight_order) * 16));
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t (&found)[4] = raw[n / 2];
      uint32_t b0, b1;
      if constexpr (W::kBits == 16) {
        b0 = found[n % 2 * 2], b1 = found[n % 2 * 2 + 1];
      } else if constexpr (W::kBits == 8) {
        convert_e4m3(found[n % 2 * 2 + s % 2], b0, b1);
      } else if (s % 2 == 0) {
        convert_int4<0>(found[n % 2 * 2 + s / 2 % 2], zeros[n], b0, b1);
      } else {
        convert_int4<1>(found[n % 2 * 2 + s / 2 % 2], zeros[n], b0, b1);
      }
#pragma unroll
      for (int m = 0; m < F::kTokenTiles; ++m) multiply_16x8x16(sums[m][n], a[m], b0, b1);
    }
  }
}

// Stores activations: a lane's pair of columns, in the order of the weights of down.
template <class W>
__device__ __forceinline__ void store_pair(bf16* row, int column, float first, float second, bool is_stored, int lane) {
  if constexpr (W::kBits == 16) {
    static_cast<void>(lane);
    if (is_stored) *reinterpret_cast<uint32_t*>(row + column) = pack_bf16(first, second);
  } else {
    // Of four columns in two lanes, the first lane stores 0 and 2, the second one 1 and 3.
    const bool is_second = lane & 1;
    const float other = __shfl_xor_sync(~0u, is_second ? first : second, 1);
    const uint32_t pair = is_second ? pack_bf16(other, second) : pack_bf16(first, other);
    uint32_t* to =
        reinterpret_cast<uint32_t*>(row) + ordered_pair<typename W::Order>(column & ~3) + (is_second ? 4 : 0);
    if (is_stored) *to = pair;
  }
}

// Grid: (blocks of rows, tiles).
template <class F, bool kIsDown>
__global__ void __launch_bounds__(F::kTileThreads) tiles_kernel(const __grid_constant__ TileArgs args) {
  using W = typename F::W;
  extern __shared__ __align__(16) uint8_t shared_weights[];
  if (static_cast<int>(blockIdx.y) >= *args.num_tiles) return;
  const SlotTile tile = args.tiles[blockIdx.y];
  const int lane = threadIdx.x % 32, row_warp = threadIdx.x / 32 % kRowWarps, token_warp = threadIdx.x / 32 / kRowWarps;
  constexpr int kRowsEach = kIsDown ? kBlockRows : kBlockRows / 2;
  const int first_row = blockIdx.x * kRowsEach;  // of the expert's matrix, or of both
  const size_t expert_row =
      (static_cast<size_t>(args.layer) * args.num_experts + tile.expert) * (kIsDown ? 1 : 2) * args.rows;
  const size_t row_bytes = static_cast<size_t>(args.columns) * W::kBits / 8;
  const uint32_t stages = shared_address(shared_weights);
  StepCopier<F, kIsDown> copier(stages, args, tile, args.weights.data + expert_row * row_bytes, first_row);
#pragma unroll
  for (int i = 0; i < F::kStages - 1; ++i) copier.next();
  TileScales<W> scales(args.weights.scales, lane, [&](int warp_row) {
    const int block_row = 32 * row_warp + warp_row;
    const int row = min(first_row + row_of<kIsDown>(block_row), args.rows - 1);
    return expert_row + (!kIsDown && block_row / 8 % 2 ? args.rows : 0) + row;
  });

  // Rows of this lane in matrix loads, and the order of their bytes.
  const int token_row = 16 * F::kTokenTiles * token_warp + lane % 16,
            weight_row = 32 * row_warp + lane / 16 * 8 + lane % 8;
  const uint32_t token_order = token_row % 8;
  const uint32_t weight_order = F::kWeightBytes >= 128  ? weight_row % 8
                                : F::kWeightBytes == 64 ? weight_row / 2 % 4
                                                        : weight_row / 4 % 2;
  const uint32_t my_tokens = stages + kBlockRows * F::kWeightBytes + token_row * F::kTokenBytes;
  const uint32_t my_weights = stages + weight_row * F::kWeightBytes;
  Sums<F> sums = {};
  [[maybe_unused]] Sums<F> partial = {};
  uint32_t zeros[4] = {};
  const int num_steps = copier.num_steps();
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    wait_for_copies<F::kStages - 2>();
    __syncthreads();
    copier.next();
    const uint32_t tokens = my_tokens + stage * F::kStageBytes, weights = my_weights + stage * F::kStageBytes;
    if (++stage == F::kStages) stage = 0;
    const int column = step * kStepColumns;
    auto multiply = [&](auto first, auto count, Sums<F>& to) {
      multiply_columns<F, decltype(first)::value, decltype(count)::value>(to, tokens, weights, token_order,
                                                                          weight_order, lane / 16, lane / 8 % 2, zeros);
    };
    using std::integral_constant;
    constexpr integral_constant<int, 0> kNone{};
    constexpr integral_constant<int, 2> kTwo{};
    constexpr integral_constant<int, 4> kFour{};
    if constexpr (!W::kIsScaled) {
      multiply(kNone, kFour, sums);
    } else if constexpr (W::kSpan < kStepColumns) {
      scales.load(column);
      if (W::kHasZeros) scales.load_zeros(zeros, column);
      multiply(kNone, kTwo, partial);
      scales.template add<F>(sums, partial);
      scales.load(column + W::kSpan);
      if (W::kHasZeros) scales.load_zeros(zeros, column + W::kSpan);
      multiply(kTwo, kTwo, partial);
      scales.template add<F>(sums, partial);
    } else {
      const int group = scale_group(args.weights.scales, column);
      const int before = step == 0 ? -1 : scale_group(args.weights.scales, column - kStepColumns);
      const int after = step + 1 == num_steps ? -1 : scale_group(args.weights.scales, column + kStepColumns);
      if (group != before) {
        scales.load(column);
        if (W::kHasZeros) scales.load_zeros(zeros, column);
      }
      multiply(kNone, kFour, partial);
      if (group != after) scales.template add<F>(sums, partial);
    }
  }
  wait_for_copies<0>();

#pragma unroll
  for (int m = 0; m < F::kTokenTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = 16 * (F::kTokenTiles * token_warp + m) + 8 * half + lane / 4;
      const bool is_token = token < tile.count;
      bf16* out = args.out + static_cast<size_t>(tile.first + (is_token ? token : 0)) * args.rows;
      if constexpr (kIsDown) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int column = first_row + 32 * row_warp + 8 * n + lane % 4 * 2;
          if (is_token && column < args.rows) {
            *reinterpret_cast<uint32_t*>(out + column) = pack_bf16(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          const int column = first_row + 16 * row_warp + 4 * n + lane % 4 * 2;
          const float (&gate)[4] = sums[m][n];
          const float (&up)[4] = sums[m][n + 1];
          store_pair<W>(out, column, silu(gate[2 * half]) * up[2 * half], silu(gate[2 * half + 1]) * up[2 * half + 1],
                        is_token && column < args.rows, lane);
        }
      }
    }
  }
}

}  // namespace meshserve::experts::sm80
