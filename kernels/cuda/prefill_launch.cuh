// The host side of prefill.cuh: tensor maps and the launch.
#pragma once
#include <math.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "prefill.cuh"
#include "tensor_map.cuh"

namespace meshserve {
namespace prefill {

struct Call {
  const bf16* q;      // [T, K, G, H]
  const void* pages;  // one layer's [P, K, 2, S, H]
  bool is_fp8;        // whether these are e4m3 and not bf16
  const int4* parts;
  const int *page_table, *positions;
  bf16* out;
  float* unmerged;  // [slots, K, slot_rows, H + 4]
  int* counters;    // [1 + slots * K * 2]
  float* sums;      // [T, K, G], or null
  int num_tokens, num_parts, num_slots, slot_rows;
  int num_pages, max_pages, kv_heads, group, page_size, head_dim;
  float scale;
};

// Returns an empty string or an error.
inline std::string status_of(const char* what, cudaError_t status) {
  return status == cudaSuccess ? "" : std::string(what) + " failed: " + cudaGetErrorString(status);
}

inline std::string encode(CUtensorMap* map, const void* data, int rank, const cuuint64_t* sizes,
                          const cuuint64_t* strides, const cuuint32_t* box, bool is_fp8 = false) {
  const auto type = is_fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle = is_fp8 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  CUresult result = CUDA_ERROR_NOT_FOUND;
  if (EncodeTiled function = encode_tiled()) {
    result =
        function(map, type, rank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  return result == CUDA_SUCCESS ? "" : "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result);
}

// The parts come from plan_parts in ../paged_attention/tiles.py; each has at most kTileRows / group tokens.
template <int H, class C>
std::string launch_with(const Call& call, cudaStream_t stream) {
  Args args = {};
  args.parts = call.parts;
  args.page_table = call.page_table;
  args.positions = call.positions;
  args.out = call.out;
  args.unmerged = call.unmerged;
  args.sums = call.sums;
  args.next_item = call.counters;
  args.num_arrived = call.counters + 1;
  args.num_tokens = call.num_tokens;
  args.num_parts = call.num_parts;
  args.max_pages = call.max_pages;
  args.page_size = call.page_size;
  args.kv_heads = call.kv_heads;
  args.group = call.group;
  args.tile_tokens = kTileRows / call.group;
  args.slot_rows = call.slot_rows;
  args.box_tokens = std::gcd(call.page_size, kBlockKeys);
  args.scale_log2 = call.scale * static_cast<float>(M_LOG2E);

  // Queries as [T, K, G, H / 64, 64]: a box holds the rows of a tile, token by token and head by head.
  const cuuint64_t h = H, heads = call.kv_heads, group = call.group;
  const cuuint64_t q_sizes[5] = {64, h / 64, group, heads, static_cast<cuuint64_t>(call.num_tokens)};
  const cuuint64_t q_strides[4] = {128, h * 2, group * h * 2, heads * group * h * 2};
  const cuuint32_t q_box[5] = {64, 1, static_cast<cuuint32_t>(call.group), 1,
                               static_cast<cuuint32_t>(args.tile_tokens)};
  const cuuint32_t lone_q_box[5] = {64, 1, static_cast<cuuint32_t>(call.group), 1, 1};
  // Pages as rows of one token each, split into halves of 128 bytes: [H / 64, rows, 64]; in 8 bits [1, rows, H].
  const cuuint64_t rows = static_cast<cuuint64_t>(call.num_pages) * heads * 2 * call.page_size;
  const cuuint64_t row = C::kIsFp8 ? h : 64;
  const cuuint64_t page_sizes[3] = {row, rows, h / row};
  const cuuint64_t page_strides[2] = {h * sizeof(typename C::Element), 128};
  const cuuint32_t page_box[3] = {static_cast<cuuint32_t>(row), static_cast<cuuint32_t>(args.box_tokens), 1};
  CUtensorMap queries, lone_queries, pages;
  std::string error = encode(&queries, call.q, 5, q_sizes, q_strides, q_box);
  if (error.empty()) error = encode(&lone_queries, call.q, 5, q_sizes, q_strides, lone_q_box);
  if (error.empty()) error = encode(&pages, call.pages, 3, page_sizes, page_strides, page_box, C::kIsFp8);
  if (!error.empty()) return error;

  int device = 0, num_multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  const auto kernel = attention_kernel<H, C>;
  constexpr int kSharedBytes = sizeof(Memory<H, C>);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  const size_t counter_bytes = (1 + static_cast<size_t>(call.num_slots) * call.kv_heads * 2) * sizeof(int);
  if (status == cudaSuccess) status = cudaMemsetAsync(call.counters, 0, counter_bytes, stream);
  if (status != cudaSuccess) return status_of("preparing prefill attention", status);
  const int num_blocks = std::min(num_multiprocessors, call.num_parts * call.kv_heads);
  kernel<<<num_blocks, kThreads, kSharedBytes, stream>>>(queries, lone_queries, pages, args);
  return status_of("launching prefill attention", cudaGetLastError());
}

inline std::string launch(const Call& call, cudaStream_t stream) {
  if (call.is_fp8) {
    return call.head_dim == 128 ? launch_with<128, Fp8Cache>(call, stream) : launch_with<64, Fp8Cache>(call, stream);
  }
  return call.head_dim == 128 ? launch_with<128, Bf16Cache>(call, stream) : launch_with<64, Bf16Cache>(call, stream);
}

}  // namespace prefill
}  // namespace meshserve
