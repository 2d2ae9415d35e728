// The host side of prefill attention: tensor maps and the launch.
#pragma once
#include <string>

#include "common/ptx.cuh"

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
std::string launch(const Call& call, cudaStream_t stream);

}  // namespace prefill
}  // namespace meshserve
