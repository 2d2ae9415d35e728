// The products of the projection kernel: how its compute warps multiply the tiles of the pipeline.
//
// A product is made when the warps begin, which is before the wait for the previous kernel; `load_input` brings what
// else the warps read themselves; `multiply` adds up the block's range in sums[kChains][N / 2], of which sums[0] is the
// result.
#pragma once
#include <type_traits>

#include "common/sm90/wgmma.cuh"
#include "projection/sm90/block.cuh"
#include "projection/sm90/integer_product.cuh"

namespace meshserve {

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

// Makes activations that the consumers have stored visible to wgmma, which reads through the proxy of the copy engine.
__device__ __forceinline__ void publish_input() {
  fence_shared_before_copies();
  sync_threads(1, kConsumers);
}

// Returns the address of the activations of iteration i, in stage s of the pipeline or among those that are resident.
template <int N, Epilogue E, class W>
__device__ __forceinline__ uint32_t input_of(const ProjectionBlock<N, E, W>& block, int i, uint32_t stage) {
  uint32_t input_stage = stage + 2 * block.half_bytes;
  if (block.is_resident) {
    input_stage = block.resident + block.stage_of(i) * block.per_stage * block.kInputBytes;
  }
  return input_stage;
}

// Weights in bf16, multiplied by wgmma where they lie in shared memory.
template <int N, Epilogue E, class W>
struct PlainProduct {
  static constexpr int kChains = kIsNarrow<N> ? 2 : 1;  // chains of wgmma hide each other's latency
  const ProjectionBlock<N, E, W>& block;

  __device__ __forceinline__ explicit PlainProduct(const ProjectionBlock<N, E, W>& block) : block(block) {}

  __device__ __forceinline__ void load_input() const {
    if (!block.is_resident) return;
    load_resident_input<N>(block.args, block.args.k_blocks, block.first_token, block.k_begin,
                           block.k_end - block.k_begin, block.k_end - block.k_begin, block.resident, [] {});
    publish_input();
  }

  __device__ __forceinline__ void multiply(float (&sums)[kChains][N / 2]) const {
    const uint32_t half_offset = (block.warp / 4) * block.half_bytes;
#pragma unroll 1
    for (int i = 0, s = 0, parity = 0, freed = -1; i < block.iterations; ++i) {
      barrier_wait(block.full + 8 * s, parity);
      const uint32_t stage = block.pipeline_address + s * block.stage_bytes;
      wgmma_begin();
#pragma unroll 1
      for (int j = 0; j < block.per_stage; ++j) {
        uint64_t a = tile_descriptor(stage + half_offset + j * kHalfTileBytes);
        uint64_t b = tile_descriptor(input_of(block, i, stage) + j * block.kInputBytes);
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) {
          wgmma<N>(sums[k % kChains], a + 2 * k, b + 2 * k, i + j > 0 || k >= kChains);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();  // the previous stage has been multiplied: free it
      if (freed >= 0 && block.lane == 0) barrier_arrive(block.empty + 8 * freed);
      freed = s;
      if (++s == block.args.stages) s = 0, parity ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      if (kChains == 2) sums[0][j] += sums[kChains - 1][j];
    }
  }
};

// Quantized weights, a block of k at a time by BlockProduct, with tables of their scales and of the activations'
// exponents in shared memory.
template <int N, Epilogue E, class W>
struct QuantizedProduct {
  static constexpr int kChains = 1;
  const ProjectionBlock<N, E, W>& block;
  ScaleTable table = {};

  __device__ __forceinline__ explicit QuantizedProduct(const ProjectionBlock<N, E, W>& block) : block(block) {
    const auto& args = block.args;
    const Scales& scales = args.scales;
    const int warp = block.warp, lane = block.lane, entries = scale_entries(scales.rows_each);
    table.columns_log2 = scales.columns_log2;
    table.first_group = block.k_begin * W::kBlockColumns >> scales.columns_log2;
    table.last_group = (block.k_end * W::kBlockColumns - 1) >> scales.columns_log2;
    table.group_bytes = 4 * entries;
    const uint32_t first_entry = block.pipeline_address + args.table_offset;
    table.address = first_entry + 4 * (kHasTokenRows<W> ? warp / 4 * 4 : entries == 8 ? warp : 16 * warp + lane / 4);
    table.second = entries == 8 ? 0 : 4 * 8;
    load_scales<W>(scales, args.row_base + block.tile * args.tile_step, args.second_half, table.first_group,
                   table.last_group - table.first_group + 1, kConsumers, first_entry);
    if constexpr (W::kIsSplit) {
      const int token_row = warp % 4 * 16 + lane / 4;
      table.exponents = block.pipeline_address + args.exponent_offset + (kHasTokenRows<W> ? token_row : 2 * (lane % 4));
      table.first_column = block.k_begin * W::kBlockColumns;
      table.num_tokens = args.batch - block.first_token;
      table.has_zero = scales.zero != nullptr;
    } else {
      sync_threads(1, kConsumers);
    }
  }

  __device__ __forceinline__ void load_input() const {
    const auto& args = block.args;
    const int k_begin = block.k_begin, num_blocks = block.k_end - block.k_begin;
    const int first_tile = k_begin * block.kInputTiles, num_tiles = num_blocks * block.kInputTiles;
    auto fetch_exponents = [&] {
      if constexpr (W::kIsSplit) {
        const uint8_t* exponents =
            args.exponents + static_cast<size_t>(block.first_token) * args.input_tiles + first_tile;
        load_exponents<N>(exponents, args.input_tiles, args.batch - block.first_token,
                          min(num_tiles, args.input_tiles - first_tile), num_tiles, kConsumers,
                          block.pipeline_address + args.exponent_offset);
      }
    };
    if constexpr (kSplitsInput<W>) {
      split_ordered<N>(args.resident_input + k_begin * W::kBlockColumns, num_blocks * W::kBlockColumns, kConsumers,
                       block.resident, block.pipeline_address + args.exponent_offset);
      publish_input();
    } else if (block.is_resident) {
      load_resident_input<N>(args, args.input_tiles, block.first_token, first_tile, num_tiles,
                             min(num_tiles, args.input_tiles - first_tile), block.resident, fetch_exponents);
      publish_input();
    } else if constexpr (W::kIsSplit) {
      fetch_exponents();
      sync_threads(1, kConsumers);
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[kChains][N / 2]) const {
    const int warp = block.warp, lane = block.lane;
#pragma unroll
    for (int j = 0; j < N / 2; ++j) sums[0][j] = 0.0f;
    // Unless wgmma reads the weights, ldmatrix takes from this lane the address of 16 bytes, among the first 32 bytes
    // of each of the warp's 16 rows.
    const int row = warp % 4 * 16 + lane % 16;
    const bool is_read_whole = W::kIsSplit && !W::kIsInt4;
    const uint32_t half_offset = (warp / 4) * block.half_bytes;
    const uint32_t lane_offset = half_offset + (is_read_whole ? 0 : row * 128 + ((lane / 16) ^ (row % 8)) * 16);
#pragma unroll 1
    for (int i = 0, s = 0, parity = 0; i < block.iterations; ++i) {
      barrier_wait(block.full + 8 * s, parity);
      const uint32_t stage = block.pipeline_address + s * block.stage_bytes;
      const int column_block = block.k_begin + block.stage_of(i);
      BlockProduct<N, W>(sums[0], stage + lane_offset, input_of(block, i, stage), table,
                         column_block * W::kBlockColumns)
          .run();
      if (lane == 0) barrier_arrive(block.empty + 8 * s);
      if (++s == block.args.stages) s = 0, parity ^= 1;
    }
  }
};

template <int N, Epilogue E, class W>
using ProductOf = std::conditional_t<W::kIsQuantized, QuantizedProduct<N, E, W>, PlainProduct<N, E, W>>;

}  // namespace meshserve
