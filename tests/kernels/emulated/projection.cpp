// Runs projections of 32 or 64 tokens at a time, or of one token, on the host (projection.cuh), one cluster of blocks
// after another.
#include "projection_operands.cuh"

using namespace meshserve;

namespace {

constexpr uint32_t kBlockBytes = 192 << 10, kPipelineBytes = 160 << 10;
constexpr int kStages = 3, kThreads = 256;

struct Problem {
  int batch, columns, tiles, splits, layer_row;  // layer_row: the first of the layer in the stack
  const float* x;                                // [batch, columns]
  const void* weights;                           // [layers, tiles * 128, columns]
  Scales scales;
  const float* sums;  // of squares [batch, columns / 128]
  float epsilon;
  // QKV:
  int kv_heads, group, pages, page_size, max_pages;
  const bf16 *q_gain, *k_gain;
  const float* cos_sin;
  const int *page_table, *positions;
  bf16 *q, *cache;
  // The output projection:
  const bf16 *residual, *next_gain;
  bf16 *out, *scaled_out;
  float* sums_out;
};

template <Epilogue E, class W>
void run(const Problem& problem) {
  constexpr int N = kSplitsInput<W>                ? 8
                    : W::kIsSplit && !kIsSingle<W> ? 32
                                                   : 64,
                kBlockInput = kTilesPerBlock<W> * kBlockK;
  const std::vector<bf16> input = activations_of<InputFormat<W>>(problem.x, problem.batch, problem.columns);
  const int rows = 2 * problem.tiles * kTileRows;
  const CUtensorMap weights = map_of_weights<W>(problem.weights, rows, problem.columns);
  std::vector<bf16> fetched;  // without the bytes of single activations that are not used
  for (size_t at = 0; at < static_cast<size_t>(problem.batch) * problem.columns; at += W::kBlockColumns) {
    fetched.insert(fetched.end(), input.begin() + at, input.begin() + at + kBlockInput);
  }
  const CUtensorMap tokens = {reinterpret_cast<const uint8_t*>(fetched.data()),
                              {kBlockK, problem.batch, problem.columns / W::kBlockColumns * kTilesPerBlock<W>},
                              {kBlockK, N, kTilesPerBlock<W>},
                              2};
  ArgsOf<E, W> args = {};
  if constexpr (W::kIsSplit) {
    args.exponents = exponents_of(input.data(), problem.batch, problem.columns);
    args.exponent_offset = 140 << 10;
  }
  if constexpr (kSplitsInput<W>) args.resident_input = input.data();
  args.batch = problem.batch;
  args.splits = problem.splits;
  args.k_blocks = problem.columns / W::kBlockColumns;
  args.stages = kStages;
  args.blocks_per_stage = 1;
  args.pipeline_bytes = kPipelineBytes;
  args.row_base = problem.layer_row;
  args.tile_step = kTileRows;
  args.second_half = kTileRows / 2;
  args.epsilon = problem.epsilon;
  args.inverse_dim = 1.0f / problem.columns;
  if constexpr (W::kIsQuantized) {
    args.scales = problem.scales;
    args.table_offset = 130 << 10;
    args.input_tiles = problem.columns / kBlockK;
  }
  if constexpr (E == Epilogue::kQkv) {
    args.sums_in = problem.sums;
    args.norm_tiles = problem.columns / 128;
    args.q_out = problem.q;
    args.q_gain = problem.q_gain, args.k_gain = problem.k_gain;
    args.cos_sin = problem.cos_sin;
    args.cache = problem.cache;
    args.page_table = problem.page_table, args.positions = problem.positions;
    args.max_pages = problem.max_pages, args.page_size = problem.page_size;
    args.kv_heads = problem.kv_heads, args.group = problem.group, args.head_dim = 128;
  } else {
    args.residual = problem.residual, args.out = problem.out;
    args.out_columns = problem.tiles * kTileRows;
    args.next_gain = problem.next_gain, args.scaled_out = problem.scaled_out, args.sums_out = problem.sums_out;
  }
  const unsigned splits = problem.splits, groups = (problem.batch + N - 1) / N;
  std::vector<uint8_t> memory((splits + 1) * kBlockBytes);
  pipeline_memory = memory.data() + 1024 - reinterpret_cast<uintptr_t>(memory.data()) % 1024;
  shared_base = pipeline_memory;
  for (unsigned c = 0; c < groups * problem.tiles; ++c) {
    std::memset(pipeline_memory, 0xFF, splits * kBlockBytes);
    Cluster state(splits, kProjectionThreads, kBlockBytes);
    cluster = &state;
    std::vector<std::unique_ptr<Block>> blocks;
    {
      CudaThreads threads(threadIdx, blockIdx, gridDim, block);
      for (unsigned i = 0; i < splits * kProjectionThreads; ++i) {
        if (i % kProjectionThreads == 0) blocks.push_back(std::make_unique<Block>(kProjectionThreads));
        threads.emplace_back([&, i, c] {
          threadIdx = {i % kProjectionThreads};
          blockIdx = {i / kProjectionThreads, c % groups, c / groups};
          gridDim = {splits, groups, static_cast<unsigned>(problem.tiles)};
          block = blocks[i / kProjectionThreads].get();
          projection_kernel<N, E, W>(weights, tokens, args);
        });
      }
    }
    cluster = nullptr;
  }
}

}  // namespace

namespace {
template <class W>
void run(bool is_qkv, const Problem& problem) {
  is_qkv ? run<Epilogue::kQkv, W>(problem) : run<Epilogue::kResidual, W>(problem);
}
}  // namespace

// `format`: bf16, e4m3 with ordered activations, with split ones, or with those of a token that the kernel splits.
extern "C" void project(int format, int is_qkv, const Problem* problem) {
  if (format == 0) run<Bf16Weights>(is_qkv != 0, *problem);
  if (format == 1) run<Fp8Weights>(is_qkv != 0, *problem);
  if (format == 2) run<RoutedFp8Weights>(is_qkv != 0, *problem);
  if (format == 3) run<OneTokenFp8Weights>(is_qkv != 0, *problem);
  if (format == 4) run<RoutedSingleFp8Weights>(is_qkv != 0, *problem);
}
