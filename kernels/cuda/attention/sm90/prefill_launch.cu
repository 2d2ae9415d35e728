#include "attention/sm90/prefill_launch.cuh"

#include <math.h>

#include <algorithm>
#include <numeric>

#include "attention/sm90/prefill_attention.cuh"
#include "common/launch.cuh"
#include "common/sm90/tensor_map.cuh"

namespace meshserve {
namespace prefill {
namespace {

std::string status_of(const char* what, cudaError_t status) {
  return status == cudaSuccess ? "" : std::string(what) + " failed: " + cudaGetErrorString(status);
}

std::string encode(CUtensorMap* map, const void* data, int rank, const cuuint64_t* sizes, const cuuint64_t* strides,
                   const cuuint32_t* box, bool is_fp8 = false) {
  const auto type = is_fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle = is_fp8 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
  return encode_tensor_map(map, data, rank, sizes, strides, box, type, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
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

  const auto kernel = kernel_of<attention_kernel<H, C>>().function;
  constexpr int kSharedBytes = sizeof(Memory<H, C>);
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  const size_t counter_bytes = (1 + static_cast<size_t>(call.num_slots) * call.kv_heads * 2) * sizeof(int);
  if (status == cudaSuccess) status = cudaMemsetAsync(call.counters, 0, counter_bytes, stream);
  if (status != cudaSuccess) return status_of("preparing prefill attention", status);
  const int num_blocks = std::min(num_multiprocessors(), call.num_parts * call.kv_heads);
  kernel<<<num_blocks, kThreads, kSharedBytes, stream>>>(queries, lone_queries, pages, args);
  return status_of("launching prefill attention", cudaGetLastError());
}

}  // namespace

std::string launch(const Call& call, cudaStream_t stream) {
  if (call.is_fp8) {
    return call.head_dim == 128 ? launch_with<128, Fp8Cache>(call, stream) : launch_with<64, Fp8Cache>(call, stream);
  }
  return call.head_dim == 128 ? launch_with<128, Bf16Cache>(call, stream) : launch_with<64, Bf16Cache>(call, stream);
}

}  // namespace prefill
}  // namespace meshserve
