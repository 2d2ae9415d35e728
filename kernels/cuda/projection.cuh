// One projection of a decode step, out[b, row] = sum_k input[b, k] weights[row, k], fused with the operations after it.
//
// A step reads every weight once, so the kernel is bound by streaming the weights. A block processes 128 rows of the
// weights (two groups of 64, one per warpgroup) and one of `splits` ranges of k. The splits of a tile form a cluster
// and add their results through distributed shared memory. One warp fetches [64, 64] tiles of weights and [N, 64] tiles
// of activations with the bulk tensor copy engine into a ring of stages. Two warpgroups multiply with wgmma, with the
// batch as its N. One more warp loads per-token data for the epilogue. The weights of the whole ring are fetched before
// the wait for the previous kernel, which hides the launch latency.
//
// RMSNorm is split over kernels: the kernel that writes the residual stream also writes x * gain (bf16) and, per tile
// of 128 columns, the sum of squares; the kernel that reads it scales its result by 1 / rms. No block has to normalize
// its input, so the copy engine can load activations unchanged.
//
// For few tokens, the compute warps read the activations themselves, all at once: the copy engine would deliver them
// late, behind the copies of weights that the next kernels have already queued.
//
// Quantised weights differ in the product (quantised.cuh) and in the form of activations (weight_formats.cuh). Their
// blocks have 128 bytes of each row, too, which are more columns, and a stage has one block.
#pragma once
#include <type_traits>

#include "e4m3_cache.cuh"
#include "head_attention.cuh"
#include "integer_product.cuh"
#include "p2p.cuh"
#include "router_part.cuh"
#include "wgmma.cuh"

namespace meshserve {

constexpr int kTileRows = 128;
constexpr int kBlockK = 64;  // bf16 columns per block: 128 bytes, the swizzle's width
constexpr int kMaxStages = 8;
constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kProducerWarp = kConsumerWarps, kHelperWarp = kConsumerWarps + 1;
constexpr int kProjectionThreads = kConsumers + 64;
constexpr int kHalfTileBytes = 64 * kBlockK * 2;
constexpr int kMaxResidentBytes = 8 * 1024;
constexpr int kSumStride = kTileRows + 4;  // floats per row of the partial sums; the extra 4 avoid bank conflicts
constexpr int kMaxSplits = 8;              // maximum cluster size that every Hopper GPU supports

// With few tokens, latency dominates, and the sums of the splits have a separate buffer. With many tokens, they reuse
// the memory of the ring because shared memory is scarce.
template <int N>
constexpr bool kIsNarrow = N <= 16;
// Bytes after the ring: barriers, 1 / rms and cache offset of each token. The narrow kernels' buffer of sums follows.
template <int N>
constexpr int kOtherBytes = 16 * kMaxStages + 16 + N * 16;

// Returns the maximum number of tokens that each split of a tile finishes; tokens are assigned round-robin.
__host__ __device__ constexpr int split_tokens(int tokens, int splits) { return (tokens + splits - 1) / splits; }

enum class Epilogue : int { kQkv, kResidual, kGateUp, kShare, kLogits, kRouted, kAttend, kAttendFp8 };

template <Epilogue E>
constexpr bool kAddsResidual = E == Epilogue::kResidual || E == Epilogue::kRouted;
template <Epilogue E>
constexpr bool kAttends = E == Epilogue::kAttend || E == Epilogue::kAttendFp8;  // whether the cluster attends
template <Epilogue E>
using CacheOf = std::conditional_t<E == Epilogue::kAttendFp8, Fp8Cache, Bf16Cache>;
template <Epilogue E>
constexpr bool kHasHeads = E == Epilogue::kQkv || kAttends<E>;

struct ProjectionArgs {
  int batch;
  int splits;    // ranges of k, which is the number of blocks per cluster
  int k_blocks;  // columns of the weights / 64
  int stages, blocks_per_stage;
  const bf16* resident_input;  // [batch, columns] if a split's activations stay in shared memory; else null
  int ring_bytes;              // of the stages and the resident input, or of the partial sums that reuse this memory
  int row_base;                // first row of this layer in the stacked weights
  int tile_step;               // rows from one tile to the next
  int second_half;             // offset in rows from the tile's first 64 rows to its second 64
  // The input's RMSNorm: sums of squares [batch, norm_tiles]. Null: no norm.
  const float* sums_in;
  int norm_tiles;
  float inverse_dim, epsilon;
  // kResidual: out = residual + result; scaled_out = out * next_gain. kGateUp: out = silu(gate) * up.
  const bf16* residual;  // may be null, may be `out`
  bf16* out;             // kLogits: float32 [batch, out_columns], which may be less than the tiles have
  int out_columns;
  const bf16* next_gain;  // null: scaled_out and sums_out are not written
  bf16* scaled_out;
  float* sums_out;  // [batch, out_columns / 128]
  // kQkv: q [batch, K, G, H]; k and v are written to their page.
  bf16* q_out;
  const bf16* q_gain;
  const bf16* k_gain;
  const float* cos_sin;  // [batch, H]: H/2 cosines, H/2 sines
  void* cache;           // this layer's [P, K, 2, S, H]
  const int* page_table;
  const int* positions;
  int max_pages, page_size, kv_heads, group, head_dim;
  bool has_fp8_cache;
  bool holds_back;  // on a mesh: the next kernel starts only after the gather before this one, see p2p.cuh
};

// kShare: the result, rounded to bf16, is sent to the inboxes of the mesh's GPUs.
struct ShareArgs : ProjectionArgs {
  P2PGroup p2p;
  int round;
};

// kRouted: kResidual, with a router that is multiplied by scaled_out.
struct RoutedArgs : ProjectionArgs {
  experts::RouterPart part;
};

// kAttend, kAttendFp8: kQkv, and attention with a cache in bf16 or e4m3.
struct AttendArgs : ProjectionArgs {
  HeadArgs heads;
};

template <Epilogue E>
using PlainArgsOf = std::conditional_t<E == Epilogue::kShare, ShareArgs,
                                       std::conditional_t<E == Epilogue::kRouted, RoutedArgs,
                                                          std::conditional_t<kAttends<E>, AttendArgs, ProjectionArgs>>>;

template <class Base>
struct QuantisedArgs : Base {
  Scales scales;
  int table_offset;       // bytes from the ring to the table of scales
  int input_tiles;        // columns of the input / 64
  bool has_plain_output;  // kGateUp: whether `out` is bf16 in order, and not for a product with quantised weights
};

template <class Base>
struct SplitArgs : QuantisedArgs<Base> {
  const uint8_t* exponents;  // of the input
  int exponent_offset;       // bytes from the ring to the table of exponents
};

template <Epilogue E, class W = Bf16Weights>
using ArgsOf = std::conditional_t<W::kIsSplit, SplitArgs<PlainArgsOf<E>>,
                                  std::conditional_t<W::kIsQuantised, QuantisedArgs<PlainArgsOf<E>>, PlainArgsOf<E>>>;

// The 4 rows of the tile that a lane holds for each token. With heads, also the head and elements of these rows.
struct LaneRows {
  int kv_head, slot, element;  // slot: 0..G-1 query heads, G key, G+1 value
  bool is_valid;
  uint2 gain;         // kResidual: gain of the next norm. With heads: gain of the head's norm
  float inverse_dim;  // 1 / head_dim
};

// Operands of a token's epilogue that earlier kernels wrote; fetched ahead to hide latency.
struct EpilogueOperands {
  uint2 residual;
  float4 cosine, sine;
};

template <Epilogue E>
__device__ __forceinline__ LaneRows lane_rows(const ProjectionArgs& args, int tile, int lane) {
  LaneRows rows = {};
  if constexpr (kAddsResidual<E>) {
    if (args.next_gain != nullptr) {
      rows.gain = *reinterpret_cast<const uint2*>(args.next_gain + tile * kTileRows + 4 * lane);
    }
  } else if constexpr (kHasHeads<E>) {
    int row = tile * kTileRows + 4 * lane, head = row / args.head_dim, heads_per_kv = args.group + 2;
    rows.kv_head = head / heads_per_kv;
    rows.slot = head % heads_per_kv;
    rows.element = row % args.head_dim;
    rows.is_valid = rows.kv_head < args.kv_heads;
    const bf16* gain = rows.slot == args.group ? args.k_gain : args.q_gain;
    rows.gain = *reinterpret_cast<const uint2*>(gain + rows.element);
    rows.inverse_dim = 1.0f / static_cast<float>(args.head_dim);
  }
  return rows;
}

// Returns the offset of a token's key for kv head 0 in the layer's cache, in elements, or -1 for padding.
__device__ __forceinline__ long long cache_offset(const ProjectionArgs& args, int token) {
  int position = token < args.batch ? args.positions[token] : -1;
  if (position < 0) return -1;
  long long page = args.page_table[token * args.max_pages + position / args.page_size];
  return (page * args.kv_heads * 2 * args.page_size + position % args.page_size) * args.head_dim;
}

template <Epilogue E>
__device__ __forceinline__ EpilogueOperands load_operands(const ProjectionArgs& args, int tile, int token, int lane) {
  EpilogueOperands operands = {};
  if (token >= args.batch) return operands;
  if constexpr (kAddsResidual<E>) {
    size_t at = static_cast<size_t>(token) * args.out_columns + tile * kTileRows + 4 * lane;
    if (args.residual != nullptr) operands.residual = *reinterpret_cast<const uint2*>(args.residual + at);
  } else if constexpr (kHasHeads<E>) {
    int half = args.head_dim / 2;
    const float* angles = args.cos_sin + token * args.head_dim + ((4 * lane) & (half - 1));
    operands.cosine = *reinterpret_cast<const float4*>(angles);
    operands.sine = *reinterpret_cast<const float4*>(angles + half);
  }
  return operands;
}

__device__ __forceinline__ float total_of(float v) { return v; }
__device__ __forceinline__ float total_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// Adds up every kLanes-th of `count` elements from `first` on, with kTogether loads in flight.
template <int kLanes, int kTogether, class Element>
__device__ __forceinline__ float sum_of(const Element* elements, int first, int count) {
  float sum = 0.0f;
#pragma unroll 1
  for (int i = first; i < count; i += kTogether * kLanes) {
    Element found[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      found[u] = {};
      if (i + u * kLanes < count) found[u] = elements[i + u * kLanes];
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) sum += total_of(found[u]);
  }
  return sum;
}

// Computes 1 / rms of N tokens' inputs with one warp: a few neighboring lanes per token. Experts' kernels leave a sum
// for each 16 columns.
template <int N>
__device__ __forceinline__ void load_inverse_rms(const ProjectionArgs& args, int first_token, int lane,
                                                 float* inverse_rms) {
  constexpr int kLanes = N < 32 ? 32 / N : 1, kTogether = N < 64 ? 8 : 2;  // as registers allow
  for (int n = lane / kLanes; n < N; n += 32 / kLanes) {
    const float* sums = args.sums_in + static_cast<size_t>(first_token + n) * args.norm_tiles;
    float sum = 0.0f;
    if (first_token + n < args.batch) {
      sum = args.norm_tiles % 4 == 0
                ? sum_of<kLanes, kTogether>(reinterpret_cast<const float4*>(sums), lane % kLanes, args.norm_tiles / 4)
                : sum_of<kLanes, kTogether>(sums, lane % kLanes, args.norm_tiles);
    }
    sum = sum_over_lanes(sum, kLanes);
    if (lane % kLanes == 0) inverse_rms[n] = rsqrtf(sum * args.inverse_dim + args.epsilon);
  }
}

// Transposes a 4 x 4 matrix over four lanes: lane i holds row i and gets column i. The lanes differ in bits 2 and 3.
__device__ __forceinline__ float4 transpose_4x4(float4 v, int i) {
  float low = __shfl_xor_sync(0xffffffffu, i % 2 ? v.x : v.y, 4);
  float high = __shfl_xor_sync(0xffffffffu, i % 2 ? v.z : v.w, 4);
  v = i % 2 ? make_float4(low, v.y, high, v.w) : make_float4(v.x, low, v.z, high);
  low = __shfl_xor_sync(0xffffffffu, i / 2 ? v.x : v.z, 8);
  high = __shfl_xor_sync(0xffffffffu, i / 2 ? v.y : v.w, 8);
  return i / 2 ? make_float4(low, high, v.z, v.w) : make_float4(v.x, v.y, low, high);
}

// Loads a narrow kernel's activations for its range of k, with all consumers: [blocks, N, 64], swizzled like tiles that
// the copy engine loads. The input has `row_blocks` blocks in a row. Of the `num_blocks`, only `num_real` exist; the
// others are zero. Calls `meanwhile` while the activations are on their way.
template <int N, class Meanwhile>
__device__ __forceinline__ void load_resident_input(const ProjectionArgs& args, int row_blocks, int first_token,
                                                    int first_block, int num_blocks, int num_real, uint32_t to,
                                                    Meanwhile meanwhile) {
  constexpr int kMost = kMaxResidentBytes / 16 / kConsumers;
  uint4 chunks[kMost];
#pragma unroll
  for (int u = 0; u < kMost; ++u) {
    int i = threadIdx.x + u * kConsumers, token = first_token + i / 8 % N, block = i / 8 / N;
    chunks[u] = make_uint4(0, 0, 0, 0);
    if (block < num_real && token < args.batch) {
      size_t at = (static_cast<size_t>(token) * row_blocks + first_block + block) * kBlockK + i % 8 * 8;
      chunks[u] = *reinterpret_cast<const uint4*>(args.resident_input + at);
    }
  }
  meanwhile();
#pragma unroll
  for (int u = 0; u < kMost; ++u) {
    int i = threadIdx.x + u * kConsumers, row = i / 8;
    if (row < num_blocks * N) store_shared(to + row * 128 + ((i % 8) ^ (row % 8)) * 16, chunks[u]);
  }
}

__device__ __forceinline__ void store_bf16x4(bf16* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}

__device__ __forceinline__ float sum_of_squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ __forceinline__ float4 shuffle_xor(float4 v, int lanes) {
  return make_float4(__shfl_xor_sync(0xffffffffu, v.x, lanes), __shfl_xor_sync(0xffffffffu, v.y, lanes),
                     __shfl_xor_sync(0xffffffffu, v.z, lanes), __shfl_xor_sync(0xffffffffu, v.w, lanes));
}

// out = residual + sum, rounded to bf16 like the residual stream. The inputs of the next norm use the rounded value.
// Returns scaled_out, if it is written.
template <class W>
__device__ __forceinline__ float4 finish_residual(const ProjectionArgs& args, int tile, int token, int lane, float4 sum,
                                                  const LaneRows& rows, const EpilogueOperands& operands) {
  float4 x = unpack_bf16(operands.residual);
  uint2 rounded = make_uint2(pack_bf16(x.x + sum.x, x.y + sum.y), pack_bf16(x.z + sum.z, x.w + sum.w));
  size_t at = static_cast<size_t>(token) * args.out_columns + tile * kTileRows + 4 * lane;
  *reinterpret_cast<uint2*>(args.out + at) = rounded;
  if (args.next_gain == nullptr) return {};
  x = unpack_bf16(rounded);
  float4 gain = unpack_bf16(rows.gain);
  float4 scaled = make_float4(x.x * gain.x, x.y * gain.y, x.z * gain.z, x.w * gain.w);
  if constexpr (W::kIsQuantised) {
    const size_t row = static_cast<size_t>(token) * args.out_columns;
    uint8_t* exponents = exponents_of(args.scaled_out, args.batch, args.out_columns) + row / kExponentColumns;
    store_activations<Left<W>>(args.scaled_out + row, exponents, tile * kTileRows + 4 * lane, scaled);
  } else {
    store_bf16x4(args.scaled_out + at, scaled);
  }
  float squares = sum_over_lanes(sum_of_squares(x), 32);
  if (lane == 0) args.sums_out[token * (args.out_columns / kTileRows) + tile] = squares;
  return scaled;
}

__device__ __forceinline__ void finish_share(const ShareArgs& args, int tile, int token, int lane, float4 sum) {
  size_t at = static_cast<size_t>(token) * args.out_columns + tile * kTileRows + 4 * lane;
  send(args.p2p, args.round, at * sizeof(bf16), make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w)));
}

// The lower half of the tile's rows is gate, the upper half the same rows of up: 16 lanes each.
template <class W, class Args>
__device__ __forceinline__ void finish_gate_up(const Args& args, int tile, int token, int lane, float4 sum) {
  float4 up = shuffle_xor(sum, 16);
  if (lane >= 16) return;
  auto silu = [](float v) { return __fdividef(v, 1.0f + __expf(-v)); };
  const float4 activated = make_float4(silu(sum.x) * up.x, silu(sum.y) * up.y, silu(sum.z) * up.z, silu(sum.w) * up.w);
  if constexpr (W::kIsQuantised) {
    if (!args.has_plain_output) {
      const size_t row = static_cast<size_t>(token) * args.out_columns;
      uint8_t* exponents = exponents_of(args.out, args.batch, args.out_columns) + row / kExponentColumns;
      return store_activations<W, 64>(args.out + row, exponents, tile * (kTileRows / 2) + 4 * lane, activated);
    }
  }
  bf16* to = args.out + static_cast<size_t>(token) * args.out_columns + tile * (kTileRows / 2) + 4 * lane;
  store_bf16x4(to, activated);
}

// Applies RMSNorm and rotary embedding to a query or key head. A head spans 16 or 32 lanes; the elements paired by the
// rotary embedding are half a head apart, in different lanes.
__device__ __forceinline__ float4 norm_and_rotate(const ProjectionArgs& args, float4 sum, const LaneRows& rows,
                                                  const EpilogueOperands& operands) {
  int lanes = args.head_dim / 4;
  float squares = sum_over_lanes(sum_of_squares(sum), lanes);
  float4 value = sum;
  if (rows.slot <= args.group) {
    float scale = rsqrtf(squares * rows.inverse_dim + args.epsilon);
    float4 gain = unpack_bf16(rows.gain);
    value = make_float4(sum.x * scale * gain.x, sum.y * scale * gain.y, sum.z * scale * gain.z, sum.w * scale * gain.w);
  }
  float4 other = shuffle_xor(value, lanes / 2);
  if (rows.slot <= args.group) {
    float4 c = operands.cosine, s = operands.sine;
    float sign = rows.element < args.head_dim / 2 ? -1.0f : 1.0f;
    value = make_float4(value.x * c.x + sign * other.x * s.x, value.y * c.y + sign * other.y * s.y,
                        value.z * c.z + sign * other.z * s.z, value.w * c.w + sign * other.w * s.w);
  }
  return value;
}

__device__ __forceinline__ uint32_t narrow_to_e4m3(float4 v) {
  return narrow_to_e4m3(pack_bf16(v.x, v.y)) | narrow_to_e4m3(pack_bf16(v.z, v.w)) << 16;
}

// Writes a key or value to the token's page.
__device__ __forceinline__ void store_in_cache(const ProjectionArgs& args, float4 value, const LaneRows& rows,
                                               long long offset) {
  long long slab = 2 * rows.kv_head + (rows.slot - args.group);
  const size_t at = offset + slab * args.page_size * args.head_dim + rows.element;
  if (args.has_fp8_cache) {
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(args.cache) + at) = narrow_to_e4m3(value);
  } else {
    store_bf16x4(static_cast<bf16*>(args.cache) + at, value);
  }
}

// Writes a finished head to q_out or the token's page.
__device__ __forceinline__ void finish_qkv(const ProjectionArgs& args, int token, float4 sum, const LaneRows& rows,
                                           const EpilogueOperands& operands, long long offset) {
  const float4 value = norm_and_rotate(args, sum, rows, operands);
  if (!rows.is_valid) return;
  if (rows.slot < args.group) {
    size_t head = (static_cast<size_t>(token) * args.kv_heads + rows.kv_head) * args.group + rows.slot;
    store_bf16x4(args.q_out + head * args.head_dim + rows.element, value);
  } else if (offset >= 0) {
    store_in_cache(args, value, rows, offset);
  }
}

// kAttend: adds up the parts of the head that this warp finishes for the block's token, and leaves it in shared memory.
// The first part of a context also writes the key and value to the token's page.
template <class C>
__device__ __forceinline__ void finish_head(const AttendArgs& args, const HeadPart& part, uint32_t received, int warp,
                                            int lane, float inverse_rms, const LaneRows& rows,
                                            const EpilogueOperands& operands, long long offset, HeadMemory* memory) {
  float4 sum = {};
#pragma unroll 1
  for (int r = 0; r < args.splits; ++r) {
    sum = add(sum, load_shared_float4(received + ((warp * args.splits + r) * kSumStride + 4 * lane) * 4));
  }
  sum = make_float4(sum.x * inverse_rms, sum.y * inverse_rms, sum.z * inverse_rms, sum.w * inverse_rms);
  const float4 value = norm_and_rotate(args, sum, rows, operands);
  if (rows.slot < args.group) return store_bf16x4(memory->q + warp * kHeadDim + rows.element, value);
  const int at = (rows.slot - args.group) * kHeadDim + rows.element;
  if constexpr (C::kIsFp8) {
    *reinterpret_cast<uint32_t*>(memory->current + at) = narrow_to_e4m3(value);
  } else {
    store_bf16x4(reinterpret_cast<bf16*>(memory->current) + at, value);
  }
  if (part.index == 0 && offset >= 0) store_in_cache(args, value, rows, offset);
}

// Grid: (splits, batch / N rounded up, tiles), with clusters of (splits, 1, 1). kAttend: (heads * splits, 1, K).
// Stage: [blocks, 64, 64] weights of the tile's first rows, the same of its second rows, then [blocks, N, 64]
// activations unless these are resident.
template <int N, Epilogue E, class W = Bf16Weights>
__global__ void __launch_bounds__(kProjectionThreads, 2)
    projection_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap input,
                      const __grid_constant__ ArgsOf<E, W> args) {
  constexpr int kInputTiles = W::kBlockColumns / kBlockK;  // per block of k
  constexpr int kInputBytes = kTilesPerBlock<W> * N * kBlockK * 2;
  constexpr int kChains = kIsNarrow<N> && !W::kIsQuantised ? 2 : 1;  // wgmma chains that hide each other's latency
  constexpr int kTogether = kHasTokenRows<W> ? 4 : N < 64 || W::kIsQuantised ? 1 : 2;  // a warp's tokens in flight
  constexpr int kPartsTogether = kMaxSplits / kTogether;  // blocks per token whose sums are in flight together
  extern __shared__ __align__(1024) uint8_t ring[];

  // The shuffle tells the compiler that the warp index is uniform within a warp, which wgmma requires.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int splits = args.splits;
  int split = blockIdx.x, tile = blockIdx.z;
  const int first_token = blockIdx.y * N;
  if constexpr (kAttends<E>) {
    split = blockIdx.x % splits;
    tile = blockIdx.z * (args.group + 2) + blockIdx.x / splits;
  }
  const bool is_power = (splits & (splits - 1)) == 0;  // a division takes some 30 instructions
  auto by_splits = [&](int n) { return is_power ? n >> (31 - __clz(splits)) : n / splits; };
  const int k_begin = by_splits(args.k_blocks * split), k_end = by_splits(args.k_blocks * (split + 1));
  const int per_stage = W::kIsQuantised ? 1 : args.blocks_per_stage;  // divides k_end - k_begin
  const int iterations = (k_end - k_begin) / per_stage;
  const uint32_t ring_address = shared_address(ring);
  const uint32_t full = ring_address + args.ring_bytes, empty = full + 8 * kMaxStages;
  const uint32_t sums_full = empty + 8 * kMaxStages;
  long long* cache_offsets = reinterpret_cast<long long*>(ring + args.ring_bytes + 16 * kMaxStages + 16);
  float* inverse_rms = reinterpret_cast<float*>(cache_offsets + N);
  const uint32_t received = shared_address(inverse_rms + 2 * N);
  const bool is_resident = kIsNarrow<N> && args.resident_input != nullptr;
  const int half_bytes = per_stage * kHalfTileBytes;
  const int stage_bytes = 2 * half_bytes + (is_resident ? 0 : per_stage * kInputBytes);
  const uint32_t resident = ring_address + args.stages * stage_bytes;
  // Tiles begin at different k, so that they do not all load the same activations at once.
  const int first_stage = kSplitsInput<W> ? 0 : blockIdx.z % iterations;
  const bool is_cluster = kAttends<E> || splits > 1;
  HeadMemory* head_memory = nullptr;
  if constexpr (kAttends<E>) {
    head_memory = reinterpret_cast<HeadMemory*>(inverse_rms + 2 * N + args.heads.blocks * kSumStride);
  }

  if (threadIdx.x == kConsumers) {
    prefetch_map(&weights);
    prefetch_map(&input);
#pragma unroll 1
    for (int s = 0; s < args.stages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, kConsumerWarps);
    }
    barrier_init(sums_full, 1);
    if (kAttends<E>) barrier_init(shared_address(&head_memory->parts_full), 1);
    barrier_init_fence();
    if (kIsNarrow<N> && !kAttends<E>) {
      const int tokens = kSplitsInput<W> ? split == 0 : split_tokens(N - split, splits);
      barrier_expect_bytes(sums_full, tokens * splits * kTileRows * 4);
    }
    if (!args.holds_back) let_next_kernel_start();
  }
  __syncthreads();
  // The blocks of a cluster write to each other's shared memory at the end, so all must have started by then.
  if (is_cluster) cluster_arrive();
  auto part_of_block = [&] {
    HeadPart part = {};
    if constexpr (kAttends<E>) part = find_head_part(args, blockIdx.x, lane);
    return part;
  };

  if (warp == kProducerWarp) {
    if (lane == 0) {
      const uint64_t weights_policy = evict_first_policy(), input_policy = evict_last_policy();
      auto column_block = [&](int i) {
        int stage = first_stage + i;
        return k_begin + (stage < iterations ? stage : stage - iterations) * per_stage;
      };
      const int row = args.row_base + tile * args.tile_step;
      auto fetch_weights = [&](int i, int s) {
        uint32_t to = ring_address + s * stage_bytes;
        int k = column_block(i);
        barrier_expect_bytes(full + 8 * s, stage_bytes);
        if constexpr (W::kIsQuantised) {
          copy_bytes(to, &weights, row, 128 * k, full + 8 * s, weights_policy);
          copy_bytes(to + half_bytes, &weights, row + args.second_half, 128 * k, full + 8 * s, weights_policy);
        } else {
          copy_tile(to, &weights, row, k, full + 8 * s, weights_policy);
          copy_tile(to + half_bytes, &weights, row + args.second_half, k, full + 8 * s, weights_policy);
        }
      };
      auto fetch_input = [&](int i, int s) {
        uint32_t to = ring_address + s * stage_bytes + 2 * half_bytes;
        const int block = column_block(i) * kTilesPerBlock<W>;
        if (!is_resident) copy_tile(to, &input, first_token, block, full + 8 * s, input_policy);
      };
      const int ahead = min(args.stages, iterations);
#pragma unroll 1
      for (int i = 0; i < ahead; ++i) fetch_weights(i, i);
      wait_for_previous_kernel();
      if (args.holds_back) let_next_kernel_start();
#pragma unroll 1
      for (int i = 0; i < ahead; ++i) fetch_input(i, i);
#pragma unroll 1
      for (int i = ahead, s = 0, parity = 0; i < iterations; ++i) {
        barrier_wait(empty + 8 * s, parity);
        fetch_weights(i, s);
        fetch_input(i, s);
        if (++s == args.stages) s = 0, parity ^= 1;
      }
    }
    __syncwarp();
    if (is_cluster) {
      cluster_wait();
      if (kAttends<E> && part_of_block().has_drafts) cluster_sync_global();
      if (!kIsNarrow<N>) cluster_sync_shared();
      if (!kIsNarrow<N>) cluster_sync();
    }
    return;
  }

  if (warp == kHelperWarp) {  // loads per-token data for the epilogue while the other warps multiply
    if (kHasHeads<E>) {
      for (int i = lane; i < N; i += 32) cache_offsets[i] = cache_offset(args, first_token + i);
    }
    wait_for_previous_kernel();
    if (kHasHeads<E> || E == Epilogue::kGateUp) load_inverse_rms<N>(args, first_token, lane, inverse_rms);
    if (is_cluster) cluster_wait();
    if (is_cluster && !kIsNarrow<N>) {
      cluster_sync_shared();
      cluster_sync();
    } else {
      arrive_threads(2, kConsumers + 32);
      if (kAttends<E> && part_of_block().has_drafts) cluster_sync_global();
    }
    return;
  }

  // Tokens are assigned round-robin to the splits, then to a split's warps.
  const int token_row = warp % 4 * 16 + lane / 4;  // the first of a lane's two, if tokens are the rows of the product
  const int token_step = splits * kConsumerWarps;
  const int first_n = split + splits * warp;
  touch_parameters(args);
  const HeadPart part = part_of_block();
  HeadAttention<W, CacheOf<E>, ArgsOf<E, W>> attention;
  int finished_tile = tile;
  if constexpr (kAttends<E>) {
    attention.begin(args, part, ring, head_memory, warp, lane);
    if (threadIdx.x == 0 && part.token >= 0) barrier_expect_bytes(sums_full, args.heads.blocks * kTileRows * 4);
    finished_tile = blockIdx.z * (args.group + 2) + min(warp, args.group + 1);
  }
  const LaneRows rows = lane_rows<E>(args, finished_tile, lane);
  ScaleTable table = {};
  if constexpr (W::kIsQuantised) {
    const Scales& scales = args.scales;
    const int entries = scale_entries(scales.rows_each);
    table.columns_log2 = scales.columns_log2;
    table.first_group = k_begin * W::kBlockColumns >> scales.columns_log2;
    table.last_group = (k_end * W::kBlockColumns - 1) >> scales.columns_log2;
    table.group_bytes = 4 * entries;
    const uint32_t first_entry = ring_address + args.table_offset;
    table.address = first_entry + 4 * (kHasTokenRows<W> ? warp / 4 * 4 : entries == 8 ? warp : 16 * warp + lane / 4);
    table.second = entries == 8 ? 0 : 4 * 8;
    load_scales<W>(scales, args.row_base + tile * args.tile_step, args.second_half, table.first_group,
                   table.last_group - table.first_group + 1, kConsumers, first_entry);
    if constexpr (W::kIsSplit) {
      table.exponents = ring_address + args.exponent_offset + (kHasTokenRows<W> ? token_row : 2 * (lane % 4));
      table.first_column = k_begin * W::kBlockColumns;
      table.num_tokens = args.batch - first_token;
      table.has_zero = scales.zero != nullptr;
    } else {
      sync_threads(1, kConsumers);
    }
  }
  experts::RouterRows router;
  if constexpr (E == Epilogue::kRouted) {
    if (split < args.batch) router.load(args.part, warp, tile, args.out_columns);
  }
  wait_for_previous_kernel();
  EpilogueOperands operands[kTogether] = {};
  auto fetch_operands = [&](int n) {
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (n + u * token_step < N) operands[u] = load_operands<E>(args, tile, first_token + n + u * token_step, lane);
    }
  };
  if constexpr (kAttends<E>) {
    if (part.token >= 0) operands[0] = load_operands<E>(args, tile, part.token, lane);
  } else if constexpr (!kHasTokenRows<W>) {
    fetch_operands(first_n);
  }

  auto fetch_exponents = [&] {
    if constexpr (W::kIsSplit) {
      const int first_tile = k_begin * kInputTiles, num_tiles = (k_end - k_begin) * kInputTiles;
      const uint8_t* exponents = args.exponents + static_cast<size_t>(first_token) * args.input_tiles + first_tile;
      load_exponents<N>(exponents, args.input_tiles, args.batch - first_token,
                        min(num_tiles, args.input_tiles - first_tile), num_tiles, kConsumers,
                        ring_address + args.exponent_offset);
    }
  };
  if constexpr (kSplitsInput<W>) {
    split_ordered<N>(args.resident_input + k_begin * W::kBlockColumns, (k_end - k_begin) * W::kBlockColumns, kConsumers,
                     resident, ring_address + args.exponent_offset);
    fence_shared_before_copies();
    sync_threads(1, kConsumers);
  } else if (is_resident) {
    if constexpr (W::kIsQuantised) {
      const int first_tile = k_begin * kInputTiles, num_tiles = (k_end - k_begin) * kInputTiles;
      load_resident_input<N>(args, args.input_tiles, first_token, first_tile, num_tiles,
                             min(num_tiles, args.input_tiles - first_tile), resident, fetch_exponents);
    } else {
      load_resident_input<N>(args, args.k_blocks, first_token, k_begin, k_end - k_begin, k_end - k_begin, resident,
                             fetch_exponents);
    }
    fence_shared_before_copies();  // wgmma reads through the same proxy as the copy engine
    sync_threads(1, kConsumers);
  } else if constexpr (W::kIsSplit) {
    fetch_exponents();
    sync_threads(1, kConsumers);
  }

  float sums[kChains][N / 2];
  const uint32_t half_offset = (warp / 4) * half_bytes;
  // Address of the activations of iteration i, in stage s of the ring or among those that are resident.
  auto input_of = [&](int i, uint32_t stage) {
    uint32_t input_stage = stage + 2 * half_bytes;
    if (is_resident) {
      int k = first_stage + i;
      input_stage = resident + (k < iterations ? k : k - iterations) * per_stage * kInputBytes;
    }
    return input_stage;
  };
  if constexpr (W::kIsQuantised) {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) sums[0][j] = 0.0f;
    // Unless wgmma reads them: of the 16 rows of the warp and the first 32 bytes of each, the 16 bytes whose address
    // ldmatrix takes from this lane.
    const int row = warp % 4 * 16 + lane % 16;
    const bool is_read_whole = W::kIsSplit && !W::kIsInt4;
    const uint32_t lane_offset = half_offset + (is_read_whole ? 0 : row * 128 + ((lane / 16) ^ (row % 8)) * 16);
#pragma unroll 1
    for (int i = 0, s = 0, parity = 0; i < iterations; ++i) {
      barrier_wait(full + 8 * s, parity);
      const uint32_t stage = ring_address + s * stage_bytes;
      const int k = first_stage + i, block = k_begin + (k < iterations ? k : k - iterations);
      BlockProduct<N, W>(sums[0], stage + lane_offset, input_of(i, stage), table, block * W::kBlockColumns).run();
      if (lane == 0) barrier_arrive(empty + 8 * s);
      if (++s == args.stages) s = 0, parity ^= 1;
    }
  } else {
#pragma unroll 1
    for (int i = 0, s = 0, parity = 0, freed = -1; i < iterations; ++i) {
      barrier_wait(full + 8 * s, parity);
      const uint32_t stage = ring_address + s * stage_bytes;
      wgmma_begin();
#pragma unroll 1
      for (int j = 0; j < per_stage; ++j) {
        uint64_t a = tile_descriptor(stage + half_offset + j * kHalfTileBytes);
        uint64_t b = tile_descriptor(input_of(i, stage) + j * kInputBytes);
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) {
          wgmma<N>(sums[k % kChains], a + 2 * k, b + 2 * k, i + j > 0 || k >= kChains);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();  // the previous stage has been multiplied: free it
      if (freed >= 0 && lane == 0) barrier_arrive(empty + 8 * freed);
      freed = s;
      if (++s == args.stages) s = 0, parity ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      if (kChains == 2) sums[0][j] += sums[kChains - 1][j];
    }
  }
  if (is_cluster) cluster_wait();
  if constexpr (kHasTokenRows<W>) fetch_operands(first_n);  // whose registers the products needed

  // Add the splits. Narrow kernels: each block sends a token's sums to the block that finishes the token, which counts
  // the received bytes. Wide kernels: each block stores its sums in the ring's memory, and the others read them there.
  if constexpr (kSplitsInput<W>) {  // a single token, which the first block finishes
    const uint32_t at = received + (split * kSumStride + 16 * warp + lane / 4) * 4;
    if (is_cluster) {
      const uint32_t to = address_in_cluster(at, 0), barrier = address_in_cluster(sums_full, 0);
      if (lane % 4 == 0) {
        send_float(to, sums[0][0], barrier);
        send_float(to + 8 * 4, sums[0][2], barrier);
      }
      if (split > 0) return arrive_threads(2, kConsumers + 32);
    } else if (lane % 4 == 0) {
      store_shared_word(at, __float_as_uint(sums[0][0]));
      store_shared_word(at + 8 * 4, __float_as_uint(sums[0][2]));
    }
  } else if constexpr (kIsNarrow<N>) {
    const unsigned num = splits;     // unsigned division takes fewer instructions
    const int index = lane / 4 % 4;  // index of the lane among the four that exchange values
    const int row = 16 * warp + 8 * (index / 2) + 4 * (lane / 16);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float4 v = make_float4(sums[0][4 * j], sums[0][4 * j + 1], sums[0][4 * j + 2], sums[0][4 * j + 3]);
      v = transpose_4x4(v, index);
      if constexpr (kAttends<E>) {  // 4 lanes for each block, which gets the sums of its token
        static_assert(kHeadBlocks == 8);
        const int to = lane / 4, token = __shfl_sync(0xffffffffu, part.token_of_lane, to);
        const int of = max(token, 0), from = lane % 2 * 16 + lane / 2 % 2 * 8 + of % 2 * 4 + of / 2;
        const uint32_t at = received + (blockIdx.x * kSumStride + 16 * warp + 4 * (lane % 4)) * 4;
        v = make_float4(__shfl_sync(0xffffffffu, v.x, from), __shfl_sync(0xffffffffu, v.y, from),
                        __shfl_sync(0xffffffffu, v.z, from), __shfl_sync(0xffffffffu, v.w, from));
        if (to < args.heads.blocks && token >= 0) {
          send_float4(address_in_cluster(at, to), v, address_in_cluster(sums_full, to));
        }
        continue;
      }
      const unsigned token = 8 * j + 2 * (lane % 4) + index % 2, to = token % num;
      int slot = split * split_tokens(N, splits) + token / num;
      uint32_t at = received + (slot * kSumStride + row) * 4;
      if (is_cluster) {
        send_float4(address_in_cluster(at, to), v, address_in_cluster(sums_full, to));
      } else {
        store_shared_float4(at, v);
      }
    }
  } else {
    sync_threads(1, kConsumers);  // both warpgroups have finished with the ring
    float* partial = reinterpret_cast<float*>(ring);
    const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      if constexpr (kHasTokenRows<W>) {
        if (j % 2 != 0) continue;
        float* to = partial + (token_row + j % 4 / 2 * 8) * kSumStride + warp / 4 * 64 + j / 4 * 8 + column;
        *reinterpret_cast<float2*>(to) = make_float2(sums[0][j], sums[0][j + 1]);
      } else {
        int token = 8 * (j / 4) + column + j % 2;
        partial[token * kSumStride + row + j % 4 / 2 * 8] = sums[0][j];
      }
    }
  }
  if (is_cluster && !kIsNarrow<N>) {
    cluster_sync_shared();
  } else {
    sync_threads(2, kConsumers + 32);  // with the helper warp
  }
  if constexpr (kAttends<E>) {
    if (!part.has_drafts) attention.fetch_more();
    if (part.token >= 0) {
      barrier_wait(sums_full, 0);
      if (warp < args.group + 2) {
        finish_head<CacheOf<E>>(args, part, received, warp, lane, inverse_rms[part.token], rows, operands[0],
                                cache_offsets[part.token], head_memory);
      }
      sync_threads(1, kConsumers);
    }
    if (part.has_drafts) {
      cluster_sync_global();
      attention.fetch_more();
    }
    if (part.token >= 0) attention.attend();
    return;
  }
  if (kIsNarrow<N> && is_cluster) barrier_wait(sums_full, 0);

  auto finish = [&](int n, float4 sum, const EpilogueOperands& fetched) {
    const int token = first_token + n;
    if (args.sums_in != nullptr) {
      float scale = inverse_rms[n];
      sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
    }
    if constexpr (kAddsResidual<E>) {
      const float4 scaled = finish_residual<W>(args, tile, token, lane, sum, rows, fetched);
      if constexpr (E == Epilogue::kRouted) {  // the ring is not needed any more
        *experts::part_columns(ring, n, lane) =
            make_uint2(pack_bf16(scaled.x, scaled.y), pack_bf16(scaled.z, scaled.w));
      }
    } else if constexpr (E == Epilogue::kGateUp) {
      finish_gate_up<W>(args, tile, token, lane, sum);
    } else if constexpr (E == Epilogue::kShare) {
      finish_share(args, tile, token, lane, sum);
    } else if constexpr (E == Epilogue::kLogits) {
      const int row = tile * kTileRows + 4 * lane;
      float* to = reinterpret_cast<float*>(args.out) + static_cast<size_t>(token) * args.out_columns + row;
      if (row < args.out_columns) *reinterpret_cast<float4*>(to) = sum;
    } else {
      finish_qkv(args, token, sum, rows, fetched, cache_offsets[n]);
    }
  };

  int n = first_n;
  if constexpr (kSplitsInput<W>) {
    if (warp == 0) {
      float4 total = {};
#pragma unroll 1
      for (int first = 0; first < splits; first += 4) {
        float4 parts[4] = {};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (first + r < splits) parts[r] = load_shared_float4(received + ((first + r) * kSumStride + 4 * lane) * 4);
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) total = add(total, parts[r]);
      }
      finish(0, total, operands[0]);
    }
  } else if constexpr (kIsNarrow<N>) {
#pragma unroll 1
    while (n < N && first_token + n < args.batch) {
      float4 total = {};
#pragma unroll 1
      for (int r = 0; r < splits; ++r) {
        int slot = r * split_tokens(N, splits) + n / splits;
        total = add(total, load_shared_float4(received + (slot * kSumStride + 4 * lane) * 4));
      }
      finish(n, total, operands[0]);
      n += token_step;
      fetch_operands(n);
    }
  }
  if constexpr (kIsNarrow<N>) {
    if constexpr (E == Epilogue::kRouted) {  // a step has at most N tokens
      if (split >= args.batch) return;
      sync_threads(1, kConsumers);
      router.score(args.part, ring, warp, tile, gridDim.z,
                   [&](int token) { return token < args.batch && token % splits == split; });
    }
    return;
  }

  // All parts of a token's sum are loaded at once; a single block is a cluster of one. A block stays until the others
  // have read its part, but does not wait until they have finished.
  bool is_waited_for = is_cluster;
#pragma unroll 1
  while (n < N && first_token + n < args.batch) {
    float4 total[kTogether] = {};
#pragma unroll 1
    for (int first = 0; first < splits; first += kPartsTogether) {
      float4 parts[kTogether][kPartsTogether] = {};
#pragma unroll
      for (int r = 0; r < kPartsTogether; ++r) {
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          if (first + r >= splits || n + u * token_step >= N) continue;
          uint32_t at = ring_address + ((n + u * token_step) * kSumStride + 4 * lane) * 4;
          parts[u][r] = load_cluster_float4(address_in_cluster(at, first + r));
        }
      }
#pragma unroll
      for (int r = 0; r < kPartsTogether; ++r) {
#pragma unroll
        for (int u = 0; u < kTogether; ++u) total[u] = add(total[u], parts[u][r]);
      }
    }
    const int next_n = n + kTogether * token_step;
    const bool is_last = next_n >= N || first_token + next_n >= args.batch;
    if (is_last && is_waited_for) {
      cluster_arrive_having(total[0].x + total[kTogether - 1].x);
      is_waited_for = false;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int m = n + u * token_step;
      if (m < N && first_token + m < args.batch) finish(m, total[u], operands[u]);
    }
    n = next_n;
    if (!is_last) fetch_operands(n);
  }
  if (is_waited_for) cluster_arrive();  // this warp had nothing to read
  if (is_cluster) cluster_wait();
}

}  // namespace meshserve
