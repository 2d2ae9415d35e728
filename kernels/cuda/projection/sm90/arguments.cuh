// The arguments of the projection kernel, and the sizes that its host side shares with it.
#pragma once
#include <type_traits>

#include "attention/sm90/head_attention.cuh"
#include "collectives/p2p.cuh"
#include "common/fp8_cache.cuh"
#include "experts/router_parts.cuh"

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
// the memory of the pipeline because shared memory is scarce.
template <int N>
constexpr bool kIsNarrow = N <= 16;
// Bytes after the pipeline: barriers, 1 / rms and cache offset of each token. The narrow kernels' buffer of sums
// follows.
constexpr int other_bytes_of(int width) { return 16 * kMaxStages + 16 + width * 16; }

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
  const bf16* resident_input;  // [batch, columns] if a split keeps its activations in shared memory; else null
  int pipeline_bytes;          // for stages and resident input, or for partial sums that reuse this memory
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
struct QuantizedArgs : Base {
  Scales scales;
  int table_offset;       // bytes from the pipeline to the table of scales
  int input_tiles;        // columns of the input / 64
  bool has_plain_output;  // kGateUp: whether `out` is bf16 in order, and not for a product with quantized weights
};

template <class Base>
struct SplitArgs : QuantizedArgs<Base> {
  const uint8_t* exponents;  // the input's
  int exponent_offset;       // bytes from the pipeline to the table of exponents
};

template <Epilogue E, class W = Bf16Weights>
using ArgsOf = std::conditional_t<W::kIsSplit, SplitArgs<PlainArgsOf<E>>,
                                  std::conditional_t<W::kIsQuantized, QuantizedArgs<PlainArgsOf<E>>, PlainArgsOf<E>>>;

}  // namespace meshserve
