// The experts of a step of many tokens: products of 128 tokens of one expert by 256 rows of its weights, with wgmma.
//
// The tokens lie in order of their experts, so a tile's are consecutive rows; only an expert's last tile is not full,
// and what it reads beyond the expert's tokens is not stored. Persistent blocks take tiles of equal work in turn:
//   warpgroup 0      one thread fetches [128, 64] tiles of tokens and [256, 64] of weights with the bulk tensor copy
//                    engine, also of the next tiles, into a ring of stages
//   warpgroups 1, 2  64 tokens each; they do not wait for each other, so one multiplies while the other stores
// gate_up: the weights are 128 rows of gate and the same 128 of up, so that a thread gets both for a token; stores
// share * silu(gate) * up. down: 256 rows.
#pragma once
#include "expert_choices.cuh"
#include "wgmma_registers.cuh"

namespace meshserve {
namespace experts {

// c[64, 256] = a b, or c += a b if `accumulate` is not 0; both operands are in shared memory.
__device__ __forceinline__ void wgmma_64x256(float (&c)[128], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, 0, 0;\n}\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
        "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
        "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
        "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),
        "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),
        "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),
        "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]), "+f"(c[64]),
        "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]), "+f"(c[72]),
        "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]),
        "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]),
        "+f"(c[89]), "+f"(c[90]), "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95]), "+f"(c[96]),
        "+f"(c[97]), "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]), "+f"(c[104]),
        "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]), "+f"(c[110]), "+f"(c[111]), "+f"(c[112]),
        "+f"(c[113]), "+f"(c[114]), "+f"(c[115]), "+f"(c[116]), "+f"(c[117]), "+f"(c[118]), "+f"(c[119]), "+f"(c[120]),
        "+f"(c[121]), "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]), "+f"(c[126]), "+f"(c[127])
      : "l"(a), "l"(b), "r"(accumulate));
}

constexpr int kTileThreads = 384, kTileTokens = 128, kTileWeights = 256, kTileColumns = 64, kTileStages = 4;
constexpr int kTokenBytes = kTileTokens * kTileColumns * 2, kWeightBytes = kTileWeights * kTileColumns * 2;
constexpr int kTileStageBytes = kTokenBytes + kWeightBytes;
constexpr int kFetchRegisters = 40, kComputeRegisters = 232;

struct TilesArgs {
  const int* first;       // [kMaxExperts + 1]: of each expert's tokens
  const float* share_of;  // of each place
  bf16* out;              // [places, rows]
  int num_experts, rows, columns;
  int first_matrix;  // of the layer in the map of the weights: an expert is one matrix [rows, columns], or two
};

struct TilesMemory {
  uint8_t ring[kTileStages][kTileStageBytes];
  uint64_t full[kTileStages], empty[kTileStages];
  int first_tile[kMaxExperts + 1], first_token[kMaxExperts + 1];
  int totals[kWarps];
};

// Copies a box of 64 columns.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int column, int row, int matrix,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

struct ExpertTile {
  int expert = 0, token, last_token, row;  // row: of the output's columns
};

// Finds tile number `tile`, given the expert of an earlier tile.
__device__ __forceinline__ void find_tile(const TilesMemory& memory, int tile, int rows_each, ExpertTile* found) {
  while (tile >= memory.first_tile[found->expert + 1]) ++found->expert;
  const int index = tile - memory.first_tile[found->expert], first = memory.first_token[found->expert];
  found->last_token = memory.first_token[found->expert + 1];
  const int token_tiles = (found->last_token - first + kTileTokens - 1) / kTileTokens;
  found->token = first + index % token_tiles * kTileTokens;
  found->row = index / token_tiles * rows_each;
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

template <bool kIsDown>
__global__ void __launch_bounds__(kTileThreads, 1)
    tiles_kernel(const __grid_constant__ CUtensorMap input, const __grid_constant__ CUtensorMap weights,
                 const __grid_constant__ TilesArgs args) {
  constexpr int kRows = kIsDown ? kTileWeights : kTileWeights / 2;  // of the output, of a tile
  extern __shared__ __align__(1024) uint8_t shared[];
  TilesMemory& memory = *reinterpret_cast<TilesMemory*>(shared);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t full = shared_address(memory.full), empty = shared_address(memory.empty);
  if (threadIdx.x == 0) {
    prefetch_map(&input);
    prefetch_map(&weights);
    for (int s = 0; s < kTileStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 8);  // compute warps
    }
    barrier_init_fence();
  }
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row_tiles = (args.rows + kRows - 1) / kRows;
  const int expert = threadIdx.x;
  int num_tiles = 0;
  if (expert < kMaxExperts) {
    const int first = args.first[expert], num_tokens = args.first[expert + 1] - first;
    memory.first_token[expert] = first;
    if (expert == kMaxExperts - 1) memory.first_token[kMaxExperts] = first + num_tokens;
    num_tiles = (num_tokens + kTileTokens - 1) / kTileTokens * row_tiles;
  }
  const int before = sum_of_lower(num_tiles, memory.totals);
  if (expert < kMaxExperts) memory.first_tile[expert] = before;
  if (expert == kMaxExperts - 1) memory.first_tile[kMaxExperts] = before + num_tiles;
  __syncthreads();
  const int all_tiles = memory.first_tile[kMaxExperts], blocks = (args.columns + kTileColumns - 1) / kTileColumns;
  ExpertTile at;

  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchRegisters));
    if (warp == 0 && lane == 0) {
      int stage = 0;
      uint32_t parity = 1;
#pragma unroll 1
      for (int tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
        find_tile(memory, tile, kRows, &at);
        const int matrix = args.first_matrix + (kIsDown ? at.expert : 2 * at.expert);
        const int row = at.row, second_row = kIsDown ? row + kTileWeights / 2 : row;
#pragma unroll 1
        for (int k = 0; k < blocks; ++k) {
          barrier_wait(empty + 8 * stage, parity);
          const uint32_t to = shared_address(memory.ring[stage]), barrier = full + 8 * stage;
          barrier_expect_bytes(barrier, kTileStageBytes);
          copy_box(to, &input, k * kTileColumns, at.token, 0, barrier);
          copy_box(to + kTokenBytes, &weights, k * kTileColumns, row, matrix, barrier);
          copy_box(to + kTokenBytes + kWeightBytes / 2, &weights, k * kTileColumns, second_row,
                   kIsDown ? matrix : matrix + 1, barrier);
          if (++stage == kTileStages) stage = 0, parity ^= 1;
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputeRegisters));
  const int group = warp / 4 - 1;
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
    find_tile(memory, tile, kRows, &at);
    float c[128];
    int previous = -1;
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
      barrier_wait(full + 8 * stage, parity);
      const uint32_t from = shared_address(memory.ring[stage]);
      const uint64_t a = tile_descriptor(from + group * (kTokenBytes / 2)), b = tile_descriptor(from + kTokenBytes);
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < kTileColumns / 16; ++i) wgmma_64x256(c, a + 2 * i, b + 2 * i, k + i > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0 && lane == 0) barrier_arrive(empty + 8 * previous);
      previous = stage;
      if (++stage == kTileStages) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    keep_in_place(c);
    if (lane == 0) barrier_arrive(empty + 8 * previous);

    // A lane's 2 columns of 8 in each of 4 groups become all 8 columns of one group: 16 bytes.
    const int quad = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = at.token + 64 * group + 16 * (warp % 4) + lane / 4 + 8 * half;
      const bool is_token = token < at.last_token;
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
}

}  // namespace experts
}  // namespace meshserve
