// Runs the kernels of the experts on the host, one block or cluster after another.
#include "experts/sm90/fp8_tiles.cuh"
#include "experts/sm90/narrow_tiles.cuh"
#include "experts/sm90/row_pipelines.cuh"
#include "experts/sm90/router.cuh"
#include "experts/sm90/one_token.cuh"
#include "experts/sm90/wide_tiles.cuh"
#include "experts/router_parts.cuh"

#include <vector>

namespace meshserve::experts {
constexpr size_t kSharedBytes = 240 << 10;
alignas(1024) uint8_t shared_rows[kSharedBytes];
alignas(1024) uint8_t shared[kPair * kSharedBytes];
}  // namespace meshserve::experts

using namespace meshserve;

namespace {

// Runs a kernel's blocks in order, each with a host thread for each of its threads.
template <class Run>
void run(int num_threads, unsigned blocks, Run kernel) {
  Block state(num_threads);
  shared_base = experts::shared;
  CudaThreads threads(threadIdx, blockIdx, gridDim, block);
  for (unsigned t = 0; t < static_cast<unsigned>(num_threads); ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      gridDim = {blocks};
      block = &state;
      for (unsigned b = 0; b < blocks; ++b) {
        blockIdx = {b};
        __syncthreads();
        if (t == 0) {  // NaN: nothing may be read before it is written
          std::memset(experts::shared_rows, 0xFF, experts::kSharedBytes);
          std::memset(experts::shared, 0xFF, sizeof(experts::shared));
        }
        __syncthreads();
        kernel();
      }
    });
  }
}

template <class... Args>
void run(void (*kernel)(Args...), unsigned blocks, const std::type_identity_t<Args>&... args) {
  run(experts::kThreads, blocks, [&] { kernel(args...); });
}

// Runs a kernel's clusters in order. Its blocks have parts of `shared` as their shared memory.
template <class Run>
void run_clusters(uint8_t* shared, uint32_t block_bytes, unsigned num_threads, unsigned clusters,
                  unsigned cluster_blocks, Run kernel) {
  shared_base = shared;
  for (unsigned c = 0; c < clusters; ++c) {
    std::memset(shared, 0xFF, cluster_blocks * block_bytes);
    Cluster state(cluster_blocks, num_threads, block_bytes);
    cluster = &state;
    std::vector<std::unique_ptr<Block>> blocks;
    {
      CudaThreads threads(threadIdx, blockIdx, gridDim, block);
      for (unsigned i = 0; i < cluster_blocks * num_threads; ++i) {
        if (i % num_threads == 0) blocks.push_back(std::make_unique<Block>(num_threads));
        threads.emplace_back([&, i, c] {
          threadIdx = {i % num_threads};
          blockIdx = {c * cluster_blocks + i / num_threads};
          gridDim = {clusters * cluster_blocks};
          block = blocks[i / num_threads].get();
          kernel();
        });
      }
    }
    cluster = nullptr;
    if (!state.sent.empty()) __trap();  // sent to a block that has ended
  }
}
// Runs a kernel whose blocks take items, which share them in pairs or are alone.
template <class Run>
void run_tiles(int num_threads, unsigned clusters, unsigned cluster_blocks, Run kernel) {
  run_clusters(experts::shared, experts::kSharedBytes, num_threads, clusters, cluster_blocks, kernel);
}

}  // namespace

extern "C" void route(int is_fp8, const experts::RouterArgs* args) {
  const unsigned clusters = (args->num_tokens + experts::kRouterTokens - 1) / experts::kRouterTokens;
  auto* kernel = is_fp8 ? experts::router_kernel<Fp8Weights> : experts::router_kernel<Bf16Weights>;
  run_clusters(experts::shared_rows, 16 << 10, experts::kThreads, clusters, experts::kRouterBlocks,
               [&] { kernel(*args); });
}
extern "C" void arrange(const experts::ArrangeArgs* args) {
  const unsigned chunks = (args->num_tokens + experts::kMaxTokens - 1) / experts::kMaxTokens;
  run(experts::count_kernel<Bf16Weights>, chunks, *args);
  run(experts::assign_slots_kernel<Bf16Weights>, chunks, *args);
}
extern "C" void scatter(int is_fp8, const experts::GatherRowsArgs* args) {
  run(is_fp8 ? experts::scatter_rows_kernel<Fp8Weights> : experts::scatter_rows_kernel<Bf16Weights>,
      (args->num_tokens * args->token_warps + experts::kWarps - 1) / experts::kWarps, *args);
}
extern "C" void place_and_gather(int is_fp8, const experts::ArrangeArgs* args, const experts::GatherRowsArgs* rows) {
  auto* kernel = is_fp8 ? experts::permute_kernel<Fp8Weights> : experts::permute_kernel<Bf16Weights>;
  run(kernel, args->num_tokens, *args, *rows);
}
extern "C" void combine(int is_split, const experts::CombineArgs* args) {
  const unsigned warps = args->num_tokens * (args->columns / 128);
  auto* kernel = is_split ? experts::combine_kernel<SplitFp8Weights> : experts::combine_kernel<Bf16Weights>;
  run(kernel, (warps + experts::kWarps - 1) / experts::kWarps, *args);
}
extern "C" void sum_rows(const experts::CombineArgs* args) {
  run(experts::sum_rows_kernel<Bf16Weights>, (args->num_tokens + experts::kWarps - 1) / experts::kWarps, *args);
}

namespace {
void choose_all(const experts::RouterArgs args) {  // `sums` holds the scores [T, kMostRouted]
  for (int token = 0; token < args.num_tokens; ++token) {
    if (threadIdx.x >= 32) continue;
    float scores[experts::kScoresEach];
    for (int i = 0; i < experts::kScoresEach; ++i) {
      scores[i] = args.sums[token * experts::kMostRouted + experts::kScoresEach * threadIdx.x + i];
    }
    const int at = token * args.num_chosen;
    const float chosen =
        experts::choose(scores, args.num_experts, args.num_chosen, args.positions[token] < 0, args.experts + at);
    const float share =
        experts::share_of_choice(scores, chosen, 0.5f, args.num_experts, args.num_chosen, args.is_normalized);
    if (static_cast<int>(threadIdx.x) < args.num_chosen) args.shares[at + threadIdx.x] = share;
  }
}
}  // namespace
extern "C" void choose(const experts::RouterArgs* args) { run(choose_all, 1, *args); }

// What the output projection does with a tile of tokens x [T, columns] that it has computed, split by split.
extern "C" void score(const bf16* x, int num_tokens, int columns, int splits, const experts::RouterPart* part) {
  const int tiles = columns / experts::kPartColumns;
  run(experts::kThreads, tiles * splits, [&] {
    const int tile = blockIdx.x / splits, split = blockIdx.x % splits, warp = threadIdx.x / 32;
    experts::RouterRows router;
    router.load(*part, warp, tile, columns);
    auto is_mine = [&](int token) { return token < num_tokens && token % splits == split; };
    for (int token = split + splits * warp; token < num_tokens; token += splits * experts::kWarps) {
      const int lane = threadIdx.x % 32;
      const bf16* from = x + token * columns + tile * experts::kPartColumns + 4 * lane;
      *experts::part_columns(experts::shared, token, lane) = *reinterpret_cast<const uint2*>(from);
    }
    __syncthreads();
    router.score(*part, experts::shared, warp, tile, tiles, is_mine);
  });
}

// Reads a row of activations, stored in the order that 8-bit weights need, in the columns' own order.
// Puts 8 columns of each of 32 lanes in the order of activations of 8-bit weights.
extern "C" void reorder(uint4* columns) {
  run(32, 1, [&] { columns[threadIdx.x] = experts::reordered<Fp8Weights>(columns[threadIdx.x]); });
}

extern "C" void gate_up(int is_fp8, unsigned blocks, const CUtensorMap* weights, const experts::RowsArgs* args) {
  const bool is_long = args->columns > 2048;
  auto* of_fp8 = is_long ? experts::gate_up_rows_kernel<Fp8Weights, 4> : experts::gate_up_rows_kernel<Fp8Weights, 2>;
  auto* of_bf16 = is_long ? experts::gate_up_rows_kernel<Bf16Weights, 8> : experts::gate_up_rows_kernel<Bf16Weights, 4>;
  if (args->num_tokens == 1) {
    auto single = [&](auto chooses) {
      return is_long ? experts::one_token_gate_up_kernel<Fp8Weights, 4, chooses>
                     : experts::one_token_gate_up_kernel<Fp8Weights, 2, chooses>;
    };
    of_fp8 = args->scores == nullptr ? single(std::false_type()) : single(std::true_type());
  }
  run(is_fp8 ? of_fp8 : of_bf16, blocks, *weights, *args);
}
extern "C" void down(int is_fp8, const CUtensorMap* weights, const experts::RowsArgs* args) {
  auto* kernel = is_fp8 ? experts::down_rows_kernel<Fp8Weights> : experts::down_rows_kernel<Bf16Weights>;
  if (is_fp8 && args->num_tokens == 1) {
    kernel = args->scores == nullptr ? experts::one_token_down_kernel<Fp8Weights, false>
                                     : experts::one_token_down_kernel<Fp8Weights, true>;
  }
  run(kernel, args->rows / experts::kPipelineRows, *weights, *args);
}
extern "C" void tiles(int is_down, int blocks, unsigned clusters, const CUtensorMap* weights, const CUtensorMap* input,
                      const experts::TilesArgs* args) {
  auto kernel_of = [&](auto blocks) {
    return is_down ? experts::wide_tiles_kernel<true, blocks> : experts::wide_tiles_kernel<false, blocks>;
  };
  auto* kernel =
      blocks == 1 ? kernel_of(std::integral_constant<int, 1>()) : kernel_of(std::integral_constant<int, 2>());
  run_tiles(experts::kTileThreads, clusters, blocks, [&] { kernel(*input, *weights, *args); });
}

// Tiles of `tokens` tokens: 16 or 64 of narrow tiles; with 8-bit weights also 128, and if choices are given, 16 or 32,
// by the kernels that find the slots themselves.
namespace {
using Tiles = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, experts::NarrowTilesArgs);
template <class W, bool kIsDown>
Tiles narrow(int tokens) {
  return tokens == 16 ? experts::narrow_tiles_kernel<kIsDown, 16, W> : experts::narrow_tiles_kernel<kIsDown, 64, W>;
}
template <bool kIsDown>
Tiles with_places(int is_fp8, int tokens) {
  if (!is_fp8) return experts::narrow_tiles_kernel<kIsDown, 16, Bf16Weights, true>;
  return tokens == 16 ? experts::narrow_tiles_kernel<kIsDown, 16, Fp8Weights, true>
                      : experts::narrow_tiles_kernel<kIsDown, 32, Fp8Weights, true>;
}
template <bool kIsDown>
void run_tiles(int is_fp8, int tokens, unsigned blocks, const CUtensorMap* maps, const experts::NarrowTilesArgs* args) {
  if (args->experts != nullptr) {
    Tiles kernel = with_places<kIsDown>(is_fp8, tokens);
    return run(experts::narrow_threads(true), blocks, [&] { kernel(maps[0], maps[1], maps[2], *args); });
  }
  Tiles kernel = is_fp8 ? narrow<Fp8Weights, kIsDown>(tokens) : narrow<Bf16Weights, kIsDown>(tokens);
  if (tokens == experts::kFp8TileTokens) {
    kernel = experts::fp8_tiles_kernel<kIsDown>;
    return run(experts::kFp8TileThreads, blocks, [&] { kernel(maps[0], maps[1], maps[2], *args); });
  }
  run(experts::narrow_threads(false), blocks, [&] { kernel(maps[0], maps[1], maps[2], *args); });
}
}  // namespace
extern "C" void narrow_tiles(int is_fp8, int tokens, int is_down, unsigned blocks, const CUtensorMap* maps,
                             const experts::NarrowTilesArgs* args) {
  (is_down ? run_tiles<true> : run_tiles<false>)(is_fp8, tokens, blocks, maps, args);
}
