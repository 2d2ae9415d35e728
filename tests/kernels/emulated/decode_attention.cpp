// Runs the kernel of decode_attention.cuh on the host, one block after another, without clusters and parts.
#include "attention/sm90/decode_attention.cuh"

#include <vector>

namespace meshserve {
constexpr size_t kSharedBytes = 240 << 10;
alignas(1024) uint8_t memory[kSharedBytes];
}  // namespace meshserve

using namespace meshserve;

namespace {

template <int H, class C, class W = Bf16Weights>
void run(const CUtensorMap& pages, const AttentionArgs& args) {
  Block state(kAttentionThreads);
  shared_base = memory;
  CudaThreads threads(threadIdx, blockIdx, gridDim, block);
  for (unsigned t = 0; t < kAttentionThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      block = &state;
      for (unsigned kv_head = 0; kv_head < static_cast<unsigned>(args.kv_heads); ++kv_head) {
        for (unsigned request = 0; request < static_cast<unsigned>(args.cuts.batch); ++request) {
          blockIdx = {0, kv_head, request};
          __syncthreads();
          if (t == 0) std::memset(memory, 0xFF, kSharedBytes);  // NaN: nothing may be read before it is written
          __syncthreads();
          attention_kernel<H, W, C>(pages, args);
        }
      }
    });
  }
}

}  // namespace

// The cache is one layer [P, K, 2, S, H] of `rows` rows. With `rounded_scales`, `out` is e4m3 and `head_dim` 128.
extern "C" void attend(int head_dim, int is_fp8, const bf16* q, const uint8_t* cache, const int* page_table,
                       const int* positions, bf16* out, int batch, int kv_heads, int group, int page_size,
                       int max_pages, int rows, int stages, int tile_tokens, float scale_log2, float* rounded_scales) {
  AttentionArgs args = {};
  args.q = q;
  args.cache = cache;
  args.page_table = page_table;
  args.cuts.positions = positions;
  args.cuts.batch = args.cuts.num_clusters = batch;
  args.out = out;
  args.rounded_scales = rounded_scales;
  args.max_pages = max_pages;
  args.page_size = page_size;
  args.kv_heads = kv_heads;
  args.group = group;
  args.stages = stages;
  args.scale_log2 = scale_log2;
  const int row = is_fp8 ? head_dim : 64, parts = head_dim / row;
  const CUtensorMap pages = {cache, {row, rows, parts}, {row, tile_tokens, parts}, is_fp8 ? 1 : 2};
  auto kernel = head_dim == 128 ? (is_fp8 ? run<128, Fp8Cache> : run<128, Bf16Cache>)
                                : (is_fp8 ? run<64, Fp8Cache> : run<64, Bf16Cache>);
  if (tile_tokens == kTileTokens<LongFp8Cache>) {
    kernel = head_dim == 128 ? run<128, LongFp8Cache> : run<64, LongFp8Cache>;
  }
  if (rounded_scales != nullptr) {
    kernel = is_fp8 ? run<128, LongFp8Cache, RoundedFp8Weights> : run<128, Bf16Cache, RoundedFp8Weights>;
  }
  kernel(pages, args);
}

// Converts a tile of e4m3 numbers [rows, 128] to two halves of bf16, as prefill attention does.
extern "C" void widen(const uint8_t* from, uint8_t* to, int rows) {
  shared_base = memory;
  std::memcpy(memory, from, rows * 128);
  constexpr int kThreads = 96, kTo = 64 << 10, kHalfBytes = 128 * 128;
  for (int thread = 0; thread < kThreads; ++thread) widen_tile<128>(0, kTo, rows, kHalfBytes, thread, kThreads);
  std::memcpy(to, memory + kTo, 2 * kHalfBytes);
}
