// Runs the QKV projection whose clusters attend (projection.cuh, head_attention.cuh) on the host, one cluster after
// another.
#include "projection_operands.cuh"

using namespace meshserve;

namespace {

constexpr uint32_t kBlockBytes = 232 << 10;
constexpr int N = kHeadTokens, kThreads = 256;

struct Problem {
  int batch, columns, splits, layer_row;  // layer_row: the first of the layer in the stack
  const float* x;                         // [batch, columns]
  const void* weights;                    // [layers, K (G + 2) H, columns]
  const float* sums;                      // of squares [batch, columns / 128]
  float epsilon, scale_log2;
  int kv_heads, group, pages, page_size, max_pages, early_stages, late_stages, least_tiles;
  const bf16 *q_gain, *k_gain;
  const float* cos_sin;
  const int *page_table, *positions;
  void* cache;     // one layer's
  bf16* attended;  // [batch, K, G, H]
};

template <Epilogue E>
void run(const Problem& problem) {
  using W = Bf16Weights;
  const std::vector<bf16> input = activations_of<W>(problem.x, problem.batch, problem.columns);
  const int rows = 2 * problem.kv_heads * (problem.group + 2) * kHeadDim;
  const CUtensorMap weights = map_of_weights<W>(problem.weights, rows, problem.columns);
  const CUtensorMap unused = {};
  ArgsOf<E, W> args = {};
  args.batch = problem.batch;
  args.splits = problem.splits;
  args.k_blocks = problem.columns / W::kBlockColumns;
  const int split_blocks = (args.k_blocks + args.splits - 1) / args.splits;
  args.stages = std::min(split_blocks, 8);
  args.blocks_per_stage = 1;
  const int input_bytes = split_blocks * (W::kBlockColumns / kBlockK) * N * kBlockK * 2;
  const int round_bytes = kHeadWarps * 2 * kProductTokens * kHeadDim * (E == Epilogue::kAttendFp8 ? 1 : 2);
  args.resident_input = input.data();
  args.row_base = problem.layer_row;
  args.tile_step = kTileRows;
  args.second_half = kTileRows / 2;
  args.epsilon = problem.epsilon;
  args.inverse_dim = 1.0f / problem.columns;
  args.heads.page_offset = args.stages * 2 * kHalfTileBytes + std::max(input_bytes, kHeadPartsBytes);
  args.pipeline_bytes = args.heads.page_offset + problem.early_stages * round_bytes;
  args.sums_in = problem.sums;
  args.norm_tiles = problem.columns / 128;
  args.q_gain = problem.q_gain, args.k_gain = problem.k_gain;
  args.cos_sin = problem.cos_sin;
  args.cache = problem.cache;
  args.has_fp8_cache = E == Epilogue::kAttendFp8;
  args.page_table = problem.page_table, args.positions = problem.positions;
  args.max_pages = problem.max_pages, args.page_size = problem.page_size;
  args.kv_heads = problem.kv_heads, args.group = problem.group, args.head_dim = kHeadDim;
  const int row = E == Epilogue::kAttendFp8 ? kHeadDim : 64, parts = kHeadDim / row;
  args.heads.pages = {static_cast<const uint8_t*>(problem.cache),
                      {row, problem.pages * problem.kv_heads * 2 * problem.page_size, parts},
                      {row, kProductTokens, parts},
                      E == Epilogue::kAttendFp8 ? 1 : 2};
  args.heads.attended = problem.attended;
  args.heads.blocks = problem.splits * (problem.group + 2);
  args.heads.early_stages = problem.early_stages;
  args.heads.stages = problem.early_stages + problem.late_stages;
  args.heads.least_tiles = problem.least_tiles;
  args.heads.scale_log2 = problem.scale_log2;
  if (args.pipeline_bytes + 16 * 1024 > static_cast<int>(kBlockBytes) ||
      problem.late_stages * round_bytes > args.stages * 2 * kHalfTileBytes) {
    __trap();
  }
  const unsigned num_blocks = args.heads.blocks, clusters = problem.kv_heads;
  std::vector<uint8_t> memory((num_blocks + 1) * kBlockBytes);
  pipeline_memory = memory.data() + 1024 - reinterpret_cast<uintptr_t>(memory.data()) % 1024;
  shared_base = pipeline_memory;
  for (unsigned c = 0; c < clusters; ++c) {
    std::memset(pipeline_memory, 0xFF, num_blocks * kBlockBytes);
    Cluster state(num_blocks, kProjectionThreads, kBlockBytes);
    cluster = &state;
    std::vector<std::unique_ptr<Block>> blocks;
    {
      CudaThreads threads(threadIdx, blockIdx, gridDim, block);
      for (unsigned i = 0; i < num_blocks * kProjectionThreads; ++i) {
        if (i % kProjectionThreads == 0) blocks.push_back(std::make_unique<Block>(kProjectionThreads));
        threads.emplace_back([&, i, c] {
          threadIdx = {i % kProjectionThreads};
          blockIdx = {i / kProjectionThreads, 0, c};
          gridDim = {num_blocks, 1, clusters};
          block = blocks[i / kProjectionThreads].get();
          projection_kernel<N, E, W>(weights, unused, args);
        });
      }
    }
    cluster = nullptr;
  }
}

}  // namespace

extern "C" void attend_heads(int is_fp8_cache, const Problem* problem) {
  is_fp8_cache != 0 ? run<Epilogue::kAttendFp8>(*problem) : run<Epilogue::kAttend>(*problem);
}
