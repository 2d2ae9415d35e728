// The host side of paged attention for all GPUs since Ampere.
#pragma once
#include <string>

#include "attention/prefill_parts.cuh"

namespace meshserve {
namespace portable {

struct Call {
  const bf16* q;      // [T, K, G, H]
  const void* pages;  // one layer's [P, K, 2, S, H]
  bool is_fp8;        // whether these are e4m3 and not bf16
  int head_dim;
  int tile_rows;       // for which the table of parts was made
  int tile_keys;       // 0: as the device has shared memory for
  int num_slots;       // of partial results
  int* counters;       // [slots * K * 2], for `args.num_arrived`
  prefill::Args args;  // but for what follows from the above
};

// Returns an empty string or an error.
std::string launch(const Call& call, float scale, cudaStream_t stream);

}  // namespace portable
}  // namespace meshserve
