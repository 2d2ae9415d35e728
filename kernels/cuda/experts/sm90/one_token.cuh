// The experts of a step of a single token, with 8-bit weights on the FP8 tensor cores.
//
// As row_pipelines.cuh, but weights are multiplied where they lie in shared memory, by the token's activations as two
// e4m3 numbers each (weight_formats.cuh). All of down's weights are there before gate and up end, so what down computes
// afterwards is what the step waits for.
//
// Hopper has no FP8 products of a single warp (nvcc makes mma.m16n8k32 of conversions to f16), but of four, a team,
// with 64 rows of weights. These are four times 16 rows: those of a warp have columns, or are of an expert, of their
// own. The operand of activations has a pair of columns for each warp, its first and its second numbers; of the result,
// a warp takes its own pair.
#pragma once
#include "common/sm90/wgmma_e4m3.cuh"
#include "experts/sm90/row_pipelines.cuh"

namespace meshserve {
namespace experts {

constexpr int kTeamWarps = 4, kTeams = kWarps / kTeamWarps;
constexpr int kUnitBlocks = 2;                        // blocks of columns that a warp splits at a time: 8 for each lane
constexpr int kSplitRows = 2 * kTeamWarps;            // rows of an operand of activations
constexpr int kSplitHalves = 128 / kExponentColumns;  // parts of a block whose columns share an exponent

// Swizzled tiles [64, 128] of weights and [8, 128] of activations.
using WeightTile = uint8_t[kTeamWarps * kPipelineCopyBytes];
using SplitTile = uint8_t[kSplitRows * 128];

// Waits for the warps of a team. The numbers are constants: otherwise a kernel takes all barriers that there are.
__device__ __forceinline__ void sync_team(int team) {
  team == 0 ? sync_threads(1, kTeamWarps * 32) : sync_threads(2, kTeamWarps * 32);
}

// c[0], c[1] = weights times activations over the two halves of a block of columns.
__device__ __forceinline__ void multiply_split(float (&c)[kSplitHalves][4], const WeightTile& weights,
                                               const SplitTile& activations) {
  const uint64_t a = tile_descriptor(shared_address(weights)), b = tile_descriptor(shared_address(activations));
#pragma unroll
  for (int step = 0; step < 4; ++step) {  // a step has 32 columns
    multiply_e4m3<kSplitRows>(c[step / 2], moved_on(a, 32 * step), moved_on(b, 32 * step), step % 2);
  }
}

// Stores 8 columns of the token for each lane as the warp's rows of the operands of two blocks, and returns what the
// columns' products are multiplied with. 8 neighboring lanes share an exponent.
__device__ __forceinline__ float store_split(SplitTile (&tiles)[kUnitBlocks], int member, const uint4& columns) {
  constexpr uint32_t kLargest = 7;  // as store_activations
  const int lane = threadIdx.x % 32;
  const uint32_t words[4] = {columns.x, columns.y, columns.z, columns.w};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, max(words[i] & 0x7FFFu, words[i] >> 16 & 0x7FFFu));
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  const uint32_t exponent = max(largest >> 7, kLargest);
  const float factor = power_of(254 + kLargest - exponent);
  E4m3Pair pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = split_e4m3(__uint_as_float(words[i] << 16) * factor, __uint_as_float(words[i] & 0xFFFF0000u) * factor);
  }
  const int block = lane / 16, chunk = lane % 16 / 2, row = 2 * member;
  uint8_t* tile = tiles[block] + lane % 2 * 8;
  *reinterpret_cast<uint2*>(tile + row * 128 + (chunk ^ row) * 16) = make_uint2(
      __byte_perm(pairs[0].first, pairs[1].first, 0x5410), __byte_perm(pairs[2].first, pairs[3].first, 0x5410));
  *reinterpret_cast<uint2*>(tile + (row + 1) * 128 + (chunk ^ (row + 1)) * 16) = make_uint2(
      __byte_perm(pairs[0].second, pairs[1].second, 0x5410), __byte_perm(pairs[2].second, pairs[3].second, 0x5410));
  return power_of(exponent == 255 ? 255 : exponent - kLargest);
}

// The experts of the token. A choice's slot is its rank among the scores, or its index among given choices.
struct SingleChoices {
  alignas(16) uint32_t keys[kMostRouted];  // order as the scores do; 0: no expert
  int active[32];                          // by slot
  int num_active;
};

// Returns the slot of the given choice of the lane, -1 if there is none, and the choice. A warp calls it.
__device__ __forceinline__ int given_slot(const RowsArgs& args, int& expert) {
  const int lane = threadIdx.x % 32;
  expert = lane < args.num_chosen ? __ldcg(args.experts + lane) : -1;
  const bool is_active = expert >= 0 && expert < args.num_experts;
  const uint32_t all = __ballot_sync(0xffffffffu, is_active);
  return is_active ? __popc(all & ((1u << lane) - 1)) : -1;
}

// Reads given choices. All threads call it.
__device__ __forceinline__ void read_choices(SingleChoices& choices, const RowsArgs& args) {
  if (threadIdx.x < 32) {
    int expert;
    const int slot = given_slot(args, expert);
    if (slot >= 0) choices.active[slot] = expert;
    const uint32_t all = __ballot_sync(0xffffffffu, slot >= 0);
    if (threadIdx.x == 0) choices.num_active = __popc(all);
  }
  __syncthreads();
}

// Chooses, and publishes the choices for down. All threads call it.
__device__ __forceinline__ void choose_and_publish(SingleChoices& choices, const RowsArgs& args, bool is_padding) {
  if (threadIdx.x == 0) choices.num_active = is_padding ? 0 : min(args.num_chosen, args.num_experts);
  choose_one(choices.keys, args, [&](int rank, int expert) {
    choices.active[rank] = expert;
    if (blockIdx.x == 0) store_past_l1(args.published + rank, is_padding ? -1 : expert + 1);
  });
}

// Waits for published choices. All threads call it.
__device__ __forceinline__ void await_choices(SingleChoices& choices, const RowsArgs& args) {
  const int lane = threadIdx.x % 32, num_chosen = min(args.num_chosen, args.num_experts);
  if (threadIdx.x < 32) {
    int expert = 0;
    do {
      if (lane < num_chosen) expert = load_past_l1(args.published + lane);
    } while (!__all_sync(0xffffffffu, lane >= num_chosen || expert != 0));
    choices.active[lane] = expert - 1;
    const uint32_t all = __ballot_sync(0xffffffffu, expert > 0);
    if (lane == 0) choices.num_active = __popc(all);
  }
  __syncthreads();
}

// Stores the shares of the choices by their slots, with one warp.
template <bool kChooses>
__device__ __forceinline__ void store_shares(float (&shares)[32], const SingleChoices& choices, const RowsArgs& args,
                                             float inverse_rms) {
  const int lane = threadIdx.x % 32;
  if constexpr (!kChooses) {
    int expert;
    const int slot = given_slot(args, expert);
    if (slot >= 0) shares[slot] = __ldcg(args.shares + lane);
    return;
  }
  const FewScores scores = scores_of(choices.keys, lane < choices.num_active ? choices.active[lane] : 0);
  shares[lane] =
      share_of_choice(scores.each, scores.chosen, inverse_rms, args.num_experts, args.num_chosen, args.is_normalized);
}

// Puts 8 columns of a row of ordered activations (weight_formats.cuh) for each lane in their own order.
__device__ __forceinline__ uint4 in_own_order(const uint4& v) {
  // The lower lane has the even ones of 16 columns, its neighbor the odd ones.
  const bool is_lower = threadIdx.x % 2 == 0;
  const uint32_t first = __shfl_xor_sync(0xffffffffu, is_lower ? v.z : v.x, 1);
  const uint32_t second = __shfl_xor_sync(0xffffffffu, is_lower ? v.w : v.y, 1);
  const uint32_t even[2] = {is_lower ? v.x : first, is_lower ? v.y : second};
  const uint32_t odd[2] = {is_lower ? first : v.z, is_lower ? second : v.w};
  return make_uint4(__byte_perm(even[0], odd[0], 0x5410), __byte_perm(even[0], odd[0], 0x7632),
                    __byte_perm(even[1], odd[1], 0x5410), __byte_perm(even[1], odd[1], 0x7632));
}

// More than half of the shared memory of an SM, so that none gets two blocks of gate and up. What the output projection
// and down need fits beside it.
constexpr size_t kMostOfAnSm = 227 * 1024 / 2;

template <int kBlocks>
struct OneTokenGateUpMemory {
  WeightTile weights[kTeams][kPipelineStages][2];  // gate's and up's
  SplitTile tokens[kTeams][kBlocks / kUnitBlocks][kUnitBlocks];
  float parts[2][kWarps][2 * kPipelineRows];
  SingleChoices choices;
  float shares[32];  // for each slot
  uint64_t full[kTeams][kPipelineStages];
};

// As gate_up_rows_kernel, but the output has its columns in their own order, and a block has every gridDim.x-th item.
template <class W, int kBlocks, bool kChooses>
__global__ void __launch_bounds__(kThreads, 2)
    one_token_gate_up_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& memory = *reinterpret_cast<OneTokenGateUpMemory<kBlocks>*>(shared);
  // The shuffle tells the compiler that the warp index is uniform within a warp, which wgmma requires.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int team = warp / kTeamWarps, member = warp % kTeamWarps;
  SingleChoices& choices = memory.choices;
  const uint32_t full = shared_address(memory.full[team]);
  if (member == 0 && lane == 0) {
    prefetch_map(&weights);
    for (int s = 0; s < kPipelineStages; ++s) barrier_init(full + 8 * s, kTeamWarps);
    barrier_init_fence();
  }
  touch_parameters(args);
  const bool is_padding = kChooses && args.positions[0] < 0;
  const int tiles = args.rows / kPipelineRows, own = blockIdx.x, step = gridDim.x;
  const Divisor by_tiles(tiles);
  const uint64_t policy = evict_first_policy();
  // Returns the first row of gate in the stack, for item `index`.
  auto row_of = [&](int index) {
    const int slot = by_tiles.divide(index);
    return args.first_row + choices.active[slot] * 2 * args.rows + (index - slot * tiles) * kPipelineRows;
  };
  int num_items = 0, num_fetched = 0;  // fetched: stages of the block
  auto fetch = [&](int stage) {
    const int index = own + num_fetched / kBlocks * step, block = num_fetched % kBlocks;
    if (index >= num_items) return;
    if (lane == 0) {
      const int row = row_of(index);
      const uint32_t barrier = full + 8 * stage;
      barrier_expect_bytes(barrier, kPipelineStageBytes);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        copy_bytes(shared_address(memory.weights[team][stage][m]) + member * kPipelineCopyBytes, &weights,
                   row + m * args.rows, (warp * kBlocks + block) * W::kBlockColumns, barrier, policy);
      }
    }
    ++num_fetched;
  };
  // Lane 2b + m has the scale of the warp's block b, of gate (m = 0) or up.
  auto load_scale = [&](int index) {
    ScaleInFlight scale = {};
    const int group = (warp * kBlocks + lane / 2) * W::kBlockColumns >> args.scales.columns_log2;
    const int grid_row = (row_of(index) + lane % 2 * args.rows) / args.scales.rows_each;
    if (lane < 2 * kBlocks) scale.load(args.scales, static_cast<size_t>(grid_row) * args.scales.grid_columns + group);
    return scale;
  };
  wait_for_previous_kernel();
  let_next_kernel_start();  // only now, since down takes the choices from here, and the residual stream
  uint4 columns[kBlocks / kUnitBlocks];
#pragma unroll
  for (int u = 0; u < kBlocks / kUnitBlocks; ++u) {
    const int column = (warp * kBlocks + u * kUnitBlocks) * W::kBlockColumns + 8 * lane;
    columns[u] = __ldcg(reinterpret_cast<const uint4*>(args.input + column));
  }
  kChooses ? choose_and_publish(choices, args, is_padding) : read_choices(choices, args);
  num_items = choices.num_active * tiles;
#pragma unroll 1
  for (int s = 0; s < kPipelineStages; ++s) fetch(s);
  if (kChooses && own == 0 && threadIdx.x < args.num_chosen) {
    args.chosen[threadIdx.x] = static_cast<int>(threadIdx.x) < choices.num_active ? choices.active[threadIdx.x] : -1;
    args.unpublished[threadIdx.x] = 0;
  }
  if (own >= num_items) return;
  ScaleInFlight scale = load_scale(own);
  float squares = 0.0f;
  if (warp == 0 && args.sums != nullptr) squares = lane_squares(args.sums, args.norm_tiles);
  float back[kBlocks][kSplitHalves];
#pragma unroll
  for (int u = 0; u < kBlocks / kUnitBlocks; ++u) {
    const float mine =
        store_split(memory.tokens[team][u], member, args.is_ordered ? in_own_order(columns[u]) : columns[u]);
#pragma unroll
    for (int i = 0; i < kUnitBlocks * kSplitHalves; ++i) {
      back[u * kUnitBlocks + i / kSplitHalves][i % kSplitHalves] = __shfl_sync(0xffffffffu, mine, 8 * i);
    }
  }
  float inverse = 1.0f;
  if (warp == 0) {
    if (args.sums != nullptr) inverse = inverse_rms_of(squares, args.inverse_dim, args.epsilon);
    store_shares<kChooses>(memory.shares, choices, args, inverse);
  }
  fence_shared_before_copies();  // wgmma reads through the same proxy as the copy engine
  sync_team(team);

  int stage = 0, buffer = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int index = own; index < num_items; index += step, buffer ^= 1) {
    const float my_scale = scale.value(args.scales);
    if (index + step < num_items) scale = load_scale(index + step);
    float sums[2][2] = {};  // gate's and up's, for rows lane / 4 and 8 more
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float products[2][kSplitHalves][4];
      barrier_wait(full + 8 * stage, parity);
      wgmma_begin();
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiply_split(products[m], memory.weights[team][stage][m],
                       memory.tokens[team][b / kUnitBlocks][b % kUnitBlocks]);
      }
      wgmma_commit();
      wgmma_wait<0>();
      sync_team(team);  // all have read the stage
      fetch(stage);
      if (++stage == kPipelineStages) stage = 0, parity ^= 1;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float of_block = __shfl_sync(0xffffffffu, my_scale, 2 * b + m);
#pragma unroll
        for (int h = 0; h < kSplitHalves; ++h) {
          float (&of)[4] = products[m][h];
          keep_in_place(of);
          const float factor = of_block * back[b][h];
#pragma unroll
          for (int i = 0; i < 2; ++i) sums[m][i] = fmaf(factor, of[2 * i] + of[2 * i + 1], sums[m][i]);
        }
      }
    }
    auto& parts = memory.parts[buffer];  // two, so that one barrier an item suffices
    if (lane % 4 == member) {            // which has the warp's pair of columns
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        parts[warp][m * kPipelineRows + lane / 4] = sums[m][0];
        parts[warp][m * kPipelineRows + lane / 4 + 8] = sums[m][1];
      }
    }
    __syncthreads();
    if (warp == 0) {
      float sum = 0.0f;  // gate's in the lower lanes, up's in the upper ones
#pragma unroll
      for (int p = 0; p < kWarps; ++p) sum += parts[p][lane];
      const float up = __shfl_xor_sync(0xffffffffu, sum, kPipelineRows);
      const int slot = by_tiles.divide(index);
      if (lane < kPipelineRows) {
        args.out[static_cast<size_t>(slot) * args.rows + (index - slot * tiles) * kPipelineRows + lane] =
            __float2bfloat16(silu(sum * inverse) * (up * inverse) * memory.shares[slot]);
      }
    }
  }
}

struct OneTokenDownMemory {
  WeightTile weights[kTeams][kPipelineStages][kUnitBlocks];
  SplitTile tokens[kTeams][kPipelineStages][kUnitBlocks];
  float parts[kWarps][kPipelineRows][1];
  SingleChoices choices;
  uint64_t full[kTeams][kPipelineStages];
};

// Grid: rows / 16 blocks. The input has its columns in their own order.
template <class W, bool kChooses>
__global__ void __launch_bounds__(kThreads, 2)
    one_token_down_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& memory = *reinterpret_cast<OneTokenDownMemory*>(shared);
  // The shuffle tells the compiler that the warp index is uniform within a warp, which wgmma requires.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int team = warp / kTeamWarps, member = warp % kTeamWarps;
  SingleChoices& choices = memory.choices;
  const uint32_t full = shared_address(memory.full[team]);
  let_next_kernel_start();
  if (member == 0 && lane == 0) {
    prefetch_map(&weights);
    for (int s = 0; s < kPipelineStages; ++s) barrier_init(full + 8 * s, kTeamWarps);
    barrier_init_fence();
  }
  touch_parameters(args);
  // Before the wait: gate_up lets this kernel start when it may choose. The last barrier also makes the others see
  // those above.
  kChooses ? await_choices(choices, args) : read_choices(choices, args);

  // The warp's unit of step i is unit warp + 8 * i. The last step may lack those of some warps.
  const int blocks = (args.columns + W::kBlockColumns - 1) / W::kBlockColumns;
  const int units_each = (blocks + kUnitBlocks - 1) / kUnitBlocks, num_units = choices.num_active * units_each;
  const int num_steps = max(0, (num_units - team * kTeamWarps + kWarps - 1) / kWarps);
  const Divisor by_units(units_each);
  struct Unit {
    int active, block;  // the expert, and the first of its blocks
  };
  auto unit_of = [&](int step) {
    const int unit = warp + kWarps * step, active = by_units.divide(unit);
    return Unit{active, (unit - active * units_each) * kUnitBlocks};
  };
  auto has_unit = [&](int step) { return warp + kWarps * step < num_units; };
  auto row_of = [&](const Unit& unit) {
    return args.first_row + choices.active[unit.active] * args.rows + static_cast<int>(blockIdx.x) * kPipelineRows;
  };
  const uint64_t policy = evict_first_policy();
  auto fetch = [&](int first) {  // the steps of a round, with one lane
    if (lane != 0) return;
#pragma unroll 1
    for (int s = 0; s < kPipelineStages && first + s < num_steps; ++s) {
      const bool is_mine = has_unit(first + s);
      barrier_expect_bytes(full + 8 * s, is_mine ? kUnitBlocks * kPipelineCopyBytes : 0);
      if (!is_mine) continue;
      const Unit unit = unit_of(first + s);
      const int row = row_of(unit);
#pragma unroll
      for (int b = 0; b < kUnitBlocks; ++b) {  // columns beyond the matrix are zeros
        copy_bytes(shared_address(memory.weights[team][s][b]) + member * kPipelineCopyBytes, &weights, row,
                   (unit.block + b) * W::kBlockColumns, full + 8 * s, policy);
      }
    }
  };
  fetch(0);
  // A lane has the scale of its columns' block.
  auto load_scale = [&](int step) {
    ScaleInFlight scale = {};
    if (has_unit(step)) {
      const Unit unit = unit_of(step);
      const int block = min(unit.block + lane / 16, blocks - 1);
      const size_t grid_row = row_of(unit) / args.scales.rows_each;
      scale.load(args.scales,
                 grid_row * args.scales.grid_columns + (block * W::kBlockColumns >> args.scales.columns_log2));
    }
    return scale;
  };
  ScaleInFlight scales[kPipelineStages];
#pragma unroll
  for (int s = 0; s < kPipelineStages; ++s) scales[s] = load_scale(s);
  // Returns where the lane's columns of a step lie in the activations; null: zeros.
  auto columns_of = [&](int step) -> const uint4* {
    if (!has_unit(step)) return nullptr;
    const Unit unit = unit_of(step);
    const int column = unit.block * W::kBlockColumns + 8 * lane;
    if (column >= args.columns) return nullptr;
    return reinterpret_cast<const uint4*>(args.input + static_cast<size_t>(unit.active) * args.columns + column);
  };
  const uint4* from[kPipelineStages];
#pragma unroll
  for (int s = 0; s < kPipelineStages; ++s) from[s] = columns_of(s);
  uint4 columns[kPipelineStages];
  auto load_columns = [&] {
#pragma unroll
    for (int s = 0; s < kPipelineStages; ++s) {
      columns[s] = make_uint4(0, 0, 0, 0);
      if (from[s] != nullptr) columns[s] = __ldcg(from[s]);
    }
  };
  const DownAddends addends = load_down_addends(args);
  // Twice: before the wait, with whatever is there, only so that the code is in the instruction caches. Blocks have the
  // time, since gate and up still read their weights.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const bool is_real = pass == 1;
    __syncthreads();
    if (is_real) wait_for_previous_kernel();
    load_columns();  // here, so that what the compiler puts before the loop does not delay it
    float sums[2] = {};
    uint32_t parity = 0;
#pragma unroll 1
    for (int first = 0; first < num_steps; first += kPipelineStages) {
      float factors[kPipelineStages];
#pragma unroll
      for (int s = 0; s < kPipelineStages; ++s) {
        factors[s] = store_split(memory.tokens[team][s], member, columns[s]) * scales[s].value(args.scales);
      }
      fence_shared_before_copies();  // wgmma reads through the same proxy as the copy engine
      sync_team(team);
      float products[kPipelineStages][kUnitBlocks][kSplitHalves][4];
#pragma unroll
      for (int s = 0; s < kPipelineStages; ++s) {
        if (is_real && first + s < num_steps) barrier_wait(full + 8 * s, parity);
      }
      wgmma_begin();
#pragma unroll
      for (int s = 0; s < kPipelineStages; ++s) {  // steps that do not exist multiply what is there
#pragma unroll
        for (int b = 0; b < kUnitBlocks; ++b) {
          multiply_split(products[s][b], memory.weights[team][s][b], memory.tokens[team][s][b]);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int s = 0; s < kPipelineStages; ++s) {
        const bool is_mine = has_unit(first + s);
#pragma unroll
        for (int b = 0; b < kUnitBlocks; ++b) {
#pragma unroll
          for (int h = 0; h < kSplitHalves; ++h) {
            float (&of)[4] = products[s][b][h];
            keep_in_place(of);
            const float factor = __shfl_sync(0xffffffffu, factors[s], 16 * b + 8 * h);
            if (!is_mine) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[i] = fmaf(factor, of[2 * i] + of[2 * i + 1], sums[i]);
          }
        }
      }
      if (!is_real || first + kPipelineStages >= num_steps) break;
      sync_team(team);  // all have read the round's weights and activations
      fetch(first + kPipelineStages);
      parity ^= 1;
#pragma unroll
      for (int s = 0; s < kPipelineStages; ++s) {
        scales[s] = load_scale(first + kPipelineStages + s);
        from[s] = columns_of(first + kPipelineStages + s);
      }
      load_columns();
    }
    if (lane % 4 == member) {  // which has the warp's pair of columns
      memory.parts[warp][lane / 4][0] = sums[0];
      memory.parts[warp][lane / 4 + 8][0] = sums[1];
    }
    __syncthreads();
    store_down<W>(args, memory.parts, addends, is_real);
  }
}

}  // namespace experts
}  // namespace meshserve
