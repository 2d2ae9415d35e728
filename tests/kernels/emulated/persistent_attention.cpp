// Runs the kernel of persistent_attention.cuh on the host, one block after another: the first one claims most of the
// work.
#include "attention/sm90/persistent_attention.cuh"
#include "common/tuning.cuh"

namespace meshserve {
constexpr size_t kSharedBytes = 240 << 10;
alignas(1024) uint8_t memory[kSharedBytes];
}  // namespace meshserve

using namespace meshserve;

template <int kWarps>
void run(const CUtensorMap& pages, const PersistentArgs& args, int num_blocks) {
  Block state(32 * kWarps);
  shared_base = memory;
  CudaThreads threads(threadIdx, blockIdx, gridDim, block);
  for (unsigned t = 0; t < 32 * kWarps; ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      block = &state;
      gridDim = {static_cast<unsigned>(num_blocks), 1, 1};
      for (unsigned number = 0; number < gridDim.x; ++number) {
        blockIdx = {number, 0, 0};
        __syncthreads();
        if (t == 0) std::memset(memory, 0xFF, kSharedBytes);  // NaN: nothing may be read before it is written
        __syncthreads();
        persistent_attention_kernel<kWarps>(pages, args);
      }
    });
  }
}

// The cache is one layer [P, K, 2, S, 128] of `rows` rows. `plan` is [num_clusters, 4].
extern "C" void attend(const bf16* q, const uint8_t* cache, const int* page_table, const PlannedPart* plan, bf16* out,
                       float* unmerged, int* arrived, int* claims, int num_clusters, int kv_heads, int group,
                       int page_size, int max_pages, int rows, int num_blocks, int is_lone, float scale_log2) {
  PersistentArgs args = {};
  args.q = q;
  args.page_table = page_table;
  args.cuts.num_clusters = num_clusters;
  args.out = out;
  args.unmerged.rows = unmerged;
  args.unmerged.num_arrived = arrived;
  args.max_pages = max_pages;
  args.page_size = page_size;
  args.kv_heads = kv_heads;
  args.group = group;
  args.scale_log2 = scale_log2;
  args.plan = plan;
  args.claims = claims;
  args.next_claims = claims + 1;
  const CUtensorMap pages = {cache, {64, rows, 2}, {64, kProductTokens, 2}, 2};
  args.stages = is_lone ? tuned::kLonePersistentStages : tuned::kPersistentStages;
  is_lone ? run<tuned::kLonePersistentWarps>(pages, args, num_blocks)
          : run<tuned::kPersistentWarps>(pages, args, num_blocks);
}
