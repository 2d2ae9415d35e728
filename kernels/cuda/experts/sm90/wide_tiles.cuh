// The experts of a step of many tokens: products of 128 tokens of one expert by 256 rows of its weights, with wgmma.
//
// The tokens lie in order of their experts, so a tile's are consecutive rows; only an expert's last tile is not full.
// Only the boxes that hold tokens of the expert are fetched, and what is computed beyond them is not
// stored. Blocks take tiles as they get ready for them, in pairs or alone (tile_items.cuh):
//   warpgroup 0      one thread fetches boxes of tokens and [256, 64] of weights with the bulk tensor copy engine, also
//                    of the next tiles, into a pipeline of stages, which the warps of both blocks of a pair free
//   warpgroups 1, 2  64 tokens each; they do not wait for each other, so one multiplies while the other stores. One
//                    without tokens does not multiply
// The second kernel, down, finds its tiles and fetches its first weights while the first one still runs.
// gate_up: the weights are 128 rows of gate and the same 128 of up, so that a thread gets both for a token; stores
// share * silu(gate) * up. down: 256 rows.
#pragma once
#include "common/sm90/wgmma_registers.cuh"
#include "experts/sm90/tile_items.cuh"

namespace meshserve {
namespace experts {

constexpr int kTileThreads = 384, kTileTokens = 128, kTileWeights = 256, kTileColumns = 64, kTileStages = 4;
constexpr int kTokenBytes = kTileTokens * kTileColumns * 2, kWeightBytes = kTileWeights * kTileColumns * 2;
constexpr int kTileStageBytes = kTokenBytes + kWeightBytes;
constexpr int kFetchRegisters = 40, kComputeRegisters = 232;

struct TilesArgs {
  const int* first;       // [kMaxExperts + 1]: of each expert's tokens
  const float* share_of;  // for each slot
  bf16* out;              // [slots, rows]
  int* num_taken;         // items that blocks have asked for; zero at first
  int rows, columns;
  int box_tokens;    // tokens of a copy: a divisor of 64, and a multiple of 8
  int first_matrix;  // the layer's first in the map of the weights: an expert is one matrix [rows, columns], or two
  bool is_permuted;  // gate_up: whether `first` and `share_of` are written before it may start
};

struct TilesMemory {
  uint8_t pipeline[kTileStages][kTileStageBytes];
  uint64_t full[kTileStages], empty[kTileStages];
  int item[kTileStages];  // to which a stage belongs, -1 after the last one
  ItemsMemory items;
};

struct ExpertTile {
  int expert = 0, token, last_token, row;  // row: of the output's columns
};

// Finds tile number `tile`, of kTokens tokens, given the expert of an earlier tile.
template <int kTokens, class Memory>
__device__ __forceinline__ void find_tile(const Memory& memory, int tile, int rows_each, ExpertTile* found) {
  while (tile >= memory.first_tile[found->expert + 1]) ++found->expert;
  const int index = tile - memory.first_tile[found->expert], first = memory.first_token[found->expert];
  found->last_token = memory.first_token[found->expert + 1];
  const int token_tiles = (found->last_token - first + kTokens - 1) / kTokens;
  found->token = first + index % token_tiles * kTokens;
  found->row = index / token_tiles * rows_each;
}

// Computes the first tile of each expert, and returns the number of tiles. All threads of the block call it.
template <int kTokens, class Memory>
__device__ __forceinline__ int count_tiles(Memory& memory, const int* first_tokens, int row_tiles) {
  const int expert = threadIdx.x;
  int num_tiles = 0;
  if (expert < kMaxExperts) {
    const int first = __ldcg(first_tokens + expert), num_tokens = __ldcg(first_tokens + expert + 1) - first;
    memory.first_token[expert] = first;
    if (expert == kMaxExperts - 1) memory.first_token[kMaxExperts] = first + num_tokens;
    num_tiles = (num_tokens + kTokens - 1) / kTokens * row_tiles;
  }
  const int before = sum_of_lower(num_tiles, memory.totals);
  if (expert < kMaxExperts) memory.first_tile[expert] = before;
  if (expert == kMaxExperts - 1) memory.first_tile[kMaxExperts] = before + num_tiles;
  __syncthreads();
  return memory.first_tile[kMaxExperts];
}

// Transposes a 4 x 4 matrix over four neighboring lanes: lane i holds row i and gets column i.
__device__ __forceinline__ uint4 transpose_quad(uint4 v, int i) {
  uint32_t low = __shfl_xor_sync(0xffffffffu, i % 2 ? v.x : v.y, 1);
  uint32_t high = __shfl_xor_sync(0xffffffffu, i % 2 ? v.z : v.w, 1);
  v = i % 2 ? make_uint4(low, v.y, high, v.w) : make_uint4(v.x, low, v.z, high);
  low = __shfl_xor_sync(0xffffffffu, i / 2 ? v.x : v.z, 2);
  high = __shfl_xor_sync(0xffffffffu, i / 2 ? v.y : v.w, 2);
  return i / 2 ? make_uint4(low, high, v.z, v.w) : make_uint4(v.x, v.y, low, high);
}

// kBlocks: of a cluster.
template <bool kIsDown, int kBlocks>
__global__ void __launch_bounds__(kTileThreads, 1)
    wide_tiles_kernel(const __grid_constant__ CUtensorMap input, const __grid_constant__ CUtensorMap weights,
                      const __grid_constant__ TilesArgs args) {
  constexpr int kRows = kIsDown ? kTileWeights : kTileWeights / 2;  // the output's, in a tile
  extern __shared__ __align__(1024) uint8_t shared[];
  TilesMemory& memory = *reinterpret_cast<TilesMemory*>(shared);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, rank = blockIdx.x % kBlocks;
  const uint32_t full = shared_address(memory.full), empty = shared_address(memory.empty);
  if (threadIdx.x == 0) {
    prefetch_map(&input);
    prefetch_map(&weights);
    for (int s = 0; s < kTileStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 8 * kBlocks);  // compute warps
    }
    Items<kBlocks>::init(memory.items);
    barrier_init_fence();
  }
  if (kBlocks > 1) cluster_arrive();
  const bool is_early = kIsDown || args.is_permuted;  // fetches weights before it waits, as it finds `first` written
  if (!is_early) wait_for_previous_kernel();
  if (kIsDown || !is_early) let_next_kernel_start();
  const int row_tiles = (args.rows + kRows - 1) / kRows;
  const int all_items = count_items<kBlocks>(memory.items, args.first, row_tiles);
  const int blocks = (args.columns + kTileColumns - 1) / kTileColumns;
  ItemTile at;
  if (kBlocks > 1) cluster_wait();  // the other block's barriers are ready

  if (warp < 4) {
    give_up_registers<kFetchRegisters>();
    if (warp == 0 && lane == 0) {
      const uint32_t box_bytes = args.box_tokens * kTileColumns * 2;
      constexpr uint32_t kHalfBytes = kWeightBytes / 2;
      Items<kBlocks> items(memory.items, args.num_taken);
      auto fetch_weights = [&](int k, int stage, int boxes) {
        const int matrix = args.first_matrix + (kIsDown ? at.expert : 2 * at.expert);
        const uint32_t to = shared_address(memory.pipeline[stage]) + kTokenBytes, barrier = full + 8 * stage;
        barrier_expect_bytes(barrier, kWeightBytes + boxes * box_bytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = at.row + (kIsDown ? i * kTileWeights / 2 : 0);
          if (kBlocks > 1 && at.shares_weights && i != rank) continue;
          fetch_box(kBlocks > 1 && at.shares_weights, to + i * kHalfBytes, &weights, k * kTileColumns, row,
                    matrix + (kIsDown ? 0 : i), barrier);
        }
      };
      auto fetch_tokens = [&](int k, int stage, int boxes) {
        const uint32_t to = shared_address(memory.pipeline[stage]), barrier = full + 8 * stage;
        const bool is_shared = kBlocks > 1 && !at.shares_weights;
        for (int i = is_shared ? rank : 0; i < boxes; i += is_shared ? kBlocks : 1) {
          fetch_box(is_shared, to + i * box_bytes, &input, k * kTileColumns, at.token + i * args.box_tokens, 0,
                    barrier);
        }
      };
      int stage = 0;
      uint32_t parity = 1;
      bool is_waiting = is_early;
      auto wait = [&] {
        wait_for_previous_kernel();
        if (!kIsDown) let_next_kernel_start();
      };
      auto advance = [&] {
        if (++stage == kTileStages) stage = 0, parity ^= 1;
      };
#pragma unroll 1
      for (int item = items.first(); item < all_items; item = items.next()) {
        items.ask();
        find_item<kBlocks>(memory.items, item, row_tiles, kRows, &at);
        const int boxes = (at.num_tokens + args.box_tokens - 1) / args.box_tokens;
        const int ahead =
            is_waiting ? min(kTileStages, blocks) : 0;  // stages whose weights are fetched before the wait
#pragma unroll 1
        for (int k = 0; k < ahead; ++k) {
          memory.item[k] = item;
          fetch_weights(k, k, boxes);
        }
        if (is_waiting) wait();
        is_waiting = false;
        const int sending = min(kTileStages, blocks - 1);
#pragma unroll 1
        for (int k = 0; k < blocks; ++k) {
          if (k >= ahead) {
            barrier_wait(empty + 8 * stage, parity);
            memory.item[stage] = item;
            fetch_weights(k, stage, boxes);
          }
          fetch_tokens(k, stage, boxes);
          if (k == sending) items.send();
          advance();
        }
      }
      if (is_waiting) wait();
      barrier_wait(empty + 8 * stage, parity);
      memory.item[stage] = -1;
      barrier_arrive(full + 8 * stage);
    }
    if (kBlocks > 1) cluster_sync();  // the other block's copies and arrivals have been received
    return;
  }

  take_registers<kComputeRegisters>();
  const int group = warp / 4 - 1;
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (;;) {
    barrier_wait(full + 8 * stage, parity);
    const int item = memory.item[stage];
    if (item < 0) break;
    find_item<kBlocks>(memory.items, item, row_tiles, kRows, &at);
    const int last_token = at.token + at.num_tokens;
    if (at.is_void || 64 * group >= at.num_tokens) {  // nothing to compute: only frees the stages
#pragma unroll 1
      for (int k = 0; k < blocks; ++k) {
        barrier_wait(full + 8 * stage, parity);
        __syncwarp();  // no lane may miss this phase
        free_stage<kBlocks>(empty + 8 * stage);
        if (++stage == kTileStages) stage = 0, parity ^= 1;
      }
      continue;
    }
    float c[128];
    int previous = -1;
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
      barrier_wait(full + 8 * stage, parity);
      const uint32_t from = shared_address(memory.pipeline[stage]);
      const uint64_t a = tile_descriptor(from + group * (kTokenBytes / 2)), b = tile_descriptor(from + kTokenBytes);
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < kTileColumns / 16; ++i) wgmma_64x256(c, a + 2 * i, b + 2 * i, k + i > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0) free_stage<kBlocks>(empty + 8 * previous);
      previous = stage;
      if (++stage == kTileStages) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    keep_in_place(c);
    free_stage<kBlocks>(empty + 8 * previous);

    // A lane's 2 columns of 8 in each of 4 groups become all 8 columns of one group: 16 bytes.
    const int quad = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = at.token + 64 * group + 16 * (warp % 4) + lane / 4 + 8 * half;
      const bool is_token = token < last_token;
      const float share = !kIsDown && is_token ? args.share_of[token] : 0.0f;
      bf16* to = args.out + static_cast<size_t>(is_token ? token : 0) * args.rows + at.row + 8 * quad;
      const int rows_left = args.rows - at.row - 8 * quad;
#pragma unroll
      for (int i = 0; i < kRows / 32; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int first = 4 * (4 * i + j) + 2 * half;
          float v[2] = {c[first], c[first + 1]};
          if (!kIsDown) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const float gate = v[r], up = c[64 + first + r];
              v[r] = __fdividef(gate, 1.0f + __expf(-gate)) * up * share;
            }
          }
          words[j] = pack_bf16(v[0], v[1]);
        }
        const uint4 v = transpose_quad(make_uint4(words[0], words[1], words[2], words[3]), quad);
        if (is_token && rows_left > 32 * i) *reinterpret_cast<uint4*>(to + 32 * i) = v;
      }
    }
  }
  if (kBlocks > 1) cluster_sync();
}

}  // namespace experts
}  // namespace meshserve
