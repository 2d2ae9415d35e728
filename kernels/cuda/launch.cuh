// The host's side: tensor maps, the shape of each launch, and the kernels of a decode step in order.
#pragma once
#include <math.h>

#include <algorithm>
#include <string>

#include "attention.cuh"
#include "prepare.cuh"
#include "projection.cuh"

namespace meshserve {

struct Shapes {
  int layers = 0, batch = 0, embed = 0, kv_heads = 0, group = 0, head_dim = 0, mlp = 0;
  int pages = 0, page_size = 0, max_pages = 0;
  int q_columns() const { return kv_heads * group * head_dim; }
  int qkv_rows() const { return kv_heads * (group + 2) * head_dim; }
};

struct Weights {  // stacked over layers
  const bf16 *input_norm, *qkv, *q_norm, *k_norm, *o, *post_norm, *gate_up, *down;
};

struct Cache {
  bf16* pages;
  const int *page_table, *positions;
};

// What the kernels of one call hand to each other; cut from one buffer.
struct Scratch {
  bf16 *scaled, *q, *attended, *activated;
  float *sums, *cos_sin;

  static size_t bytes(const Shapes& s) {
    Scratch none;
    return none.carve(s, nullptr);
  }
  size_t carve(const Shapes& s, uint8_t* buffer) {
    size_t used = 0;
    auto take = [&](size_t bytes) {
      uint8_t* at = buffer + used;
      used += (bytes + 255) / 256 * 256;
      return at;
    };
    size_t b = s.batch;
    scaled = reinterpret_cast<bf16*>(take(b * s.embed * 2));
    sums = reinterpret_cast<float*>(take(b * (s.embed / kTileRows) * 4));
    cos_sin = reinterpret_cast<float*>(take(b * s.head_dim * 4));
    q = reinterpret_cast<bf16*>(take(b * s.q_columns() * 2));
    attended = reinterpret_cast<bf16*>(take(b * s.q_columns() * 2));
    activated = reinterpret_cast<bf16*>(take(b * s.mlp * 2));
    return used;
  }
};

// Overrides of the launch shapes, for measuring; 0 chooses.
struct Tuning {
  int qkv_splits = 0, o_splits = 0, gate_up_splits = 0, down_splits = 0, attention_splits = 0;
  int blocks_per_stage = 0, pair = 0, ring_kilobytes = 0;
};

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                                         &result);
    return error == cudaSuccess ? reinterpret_cast<EncodeTiled>(found) : nullptr;
  }();
  return function;
}

class Step {
 public:
  Step(const Shapes& shapes, const Tuning& tuning, cudaStream_t stream)
      : shapes_(shapes), tuning_(tuning), stream_(stream) {}

  Weights weights = {};
  Cache cache = {};
  Scratch scratch = {};
  float epsilon = 0.0f, scale = 0.0f, rotary_scale = 1.0f;
  const float* inverse_frequencies = nullptr;

  // Empty, or what went wrong first.
  const std::string& error() const { return error_; }

  // x * gain and the sums of squares of x; the rotary angles too where the scratch has room for them.
  void prepare(const bf16* x, const bf16* gain, bool with_angles) {
    PrepareArgs args = {};
    args.x = x;
    args.gain = gain;
    args.scaled = scratch.scaled;
    args.sums = scratch.sums;
    args.columns = shapes_.embed;
    args.positions = with_angles ? cache.positions : nullptr;
    args.inverse_frequencies = inverse_frequencies;
    args.cos_sin = scratch.cos_sin;
    args.rotary_scale = rotary_scale;
    args.head_dim = shapes_.head_dim;
    launch("prepare", prepare_kernel, dim3(shapes_.batch), kPrepareThreads, 0, 1, args);
  }

  void qkv(int layer, bf16* q) {
    ProjectionArgs args = normed();
    args.epilogue = Epilogue::kQkv;
    args.row_base = layer * shapes_.qkv_rows();
    args.q_out = q;
    args.q_gain = weights.q_norm + static_cast<size_t>(layer) * shapes_.head_dim;
    args.k_gain = weights.k_norm + static_cast<size_t>(layer) * shapes_.head_dim;
    args.cos_sin = scratch.cos_sin;
    args.cache = cache.pages + layer * layer_elements();
    args.page_table = cache.page_table;
    args.positions = cache.positions;
    args.max_pages = shapes_.max_pages;
    args.page_size = shapes_.page_size;
    args.kv_heads = shapes_.kv_heads;
    args.group = shapes_.group;
    args.head_dim = shapes_.head_dim;
    int tiles = (shapes_.qkv_rows() + kTileRows - 1) / kTileRows;
    project("qkv", args, weights.qkv, shapes_.qkv_rows(), shapes_.embed, scratch.scaled, tiles, tuning_.qkv_splits);
  }

  void attention(int layer, const bf16* q, bf16* out) {
    const int h = shapes_.head_dim;
    AttentionArgs args = {};
    args.q = q;
    args.cache = cache.pages + layer * layer_elements();
    args.page_table = cache.page_table;
    args.positions = cache.positions;
    args.out = out;
    args.first_row = layer * (layer_elements() / h);
    args.max_pages = shapes_.max_pages;
    args.page_size = shapes_.page_size;
    args.kv_heads = shapes_.kv_heads;
    args.group = shapes_.group;
    args.splits = tuning_.attention_splits ? tuning_.attention_splits : attention_splits();
    args.scale_log2 = scale * static_cast<float>(M_LOG2E);
    CUtensorMap pages;
    if (!map_pages(&pages)) return;
    dim3 grid(args.splits, shapes_.kv_heads, shapes_.batch);
    auto run = [&](auto kernel, size_t received_bytes, int stages) {
      size_t shared = kAttentionWarps * (kWarpRingBytes + 8 * stages) + received_bytes;
      launch("attention", kernel, grid, kAttentionThreads, shared, args.splits, pages, args);
    };
    auto stages = [](int head_dim) { return kWarpRingBytes / (4 * kTileTokens * head_dim); };
    if (h == 128) run(attention_kernel<128>, sizeof(Received<128>), stages(128));
    if (h == 64) run(attention_kernel<64>, sizeof(Received<64>), stages(64));
  }

  // out = residual (may be null) + attended o^T; where `next_gain` is given, what the next norm needs too.
  void output(int layer, const bf16* attended, const bf16* residual, bf16* out, const bf16* next_gain) {
    ProjectionArgs args = residual_args(layer, residual, out, next_gain);
    project("o", args, weights.o, shapes_.embed, shapes_.q_columns(), attended, shapes_.embed / kTileRows,
            tuning_.o_splits);
  }

  void gate_up(int layer, bf16* activated) {
    ProjectionArgs args = normed();
    args.epilogue = Epilogue::kGateUp;
    args.row_base = layer * 2 * shapes_.mlp;
    args.tile_step = kTileRows / 2;
    args.second_half = shapes_.mlp;
    args.out = activated;
    args.out_columns = shapes_.mlp;
    project("gate_up", args, weights.gate_up, 2 * shapes_.mlp, shapes_.embed, scratch.scaled,
            shapes_.mlp / (kTileRows / 2), tuning_.gate_up_splits);
  }

  void down(int layer, const bf16* activated, const bf16* residual, bf16* out, const bf16* next_gain) {
    ProjectionArgs args = residual_args(layer, residual, out, next_gain);
    project("down", args, weights.down, shapes_.embed, shapes_.mlp, activated, shapes_.embed / kTileRows,
            tuning_.down_splits);
  }

 private:
  size_t layer_elements() const {
    return static_cast<size_t>(shapes_.pages) * shapes_.kv_heads * 2 * shapes_.page_size * shapes_.head_dim;
  }

  ProjectionArgs base() const {
    ProjectionArgs args = {};
    args.batch = shapes_.batch;
    args.tile_step = kTileRows;
    args.second_half = kTileRows / 2;
    args.epsilon = epsilon;
    return args;
  }

  ProjectionArgs normed() const {
    ProjectionArgs args = base();
    args.sums_in = scratch.sums;
    args.norm_tiles = shapes_.embed / kTileRows;
    args.inverse_dim = 1.0f / static_cast<float>(shapes_.embed);
    return args;
  }

  ProjectionArgs residual_args(int layer, const bf16* residual, bf16* out, const bf16* next_gain) const {
    ProjectionArgs args = base();
    args.epilogue = Epilogue::kResidual;
    args.row_base = layer * shapes_.embed;
    args.residual = residual;
    args.out = out;
    args.out_columns = shapes_.embed;
    args.next_gain = next_gain;
    args.scaled_out = scratch.scaled;
    args.sums_out = scratch.sums;
    return args;
  }

  // Enough blocks for every SM, and a split of at most 4096 tokens, as requests differ in length.
  int attention_splits() const {
    int splits = 1;
    int pairs = shapes_.batch * shapes_.kv_heads, context = shapes_.max_pages * shapes_.page_size;
    while (splits < 8 && (2 * splits * pairs <= kMultiprocessors || context / splits > 4096)) splits *= 2;
    return splits;
  }

  void project(const char* name, ProjectionArgs args, const bf16* matrix, int rows, int columns, const bf16* input,
               int tiles, int splits) {
    switch (args.batch <= 8 ? 8 : args.batch <= 16 ? 16 : args.batch <= 32 ? 32 : args.batch <= 64 ? 64 : 128) {
      case 8: return project_tiled<8>(name, args, matrix, rows, columns, input, tiles, splits);
      case 16: return project_tiled<16>(name, args, matrix, rows, columns, input, tiles, splits);
      case 32: return project_tiled<32>(name, args, matrix, rows, columns, input, tiles, splits);
      case 64: return project_tiled<64>(name, args, matrix, rows, columns, input, tiles, splits);
      default: return project_tiled<128>(name, args, matrix, rows, columns, input, tiles, splits);
    }
  }

  template <int N>
  void project_tiled(const char* name, ProjectionArgs& args, const bf16* matrix, int rows, int columns,
                     const bf16* input, int tiles, int splits) {
    constexpr int kBlockBytes = 2 * kHalfTileBytes + N * kBlockK * 2;
    args.k_blocks = columns / kBlockK;
    args.pair = tuning_.pair ? tuning_.pair : (N >= 64 ? 2 : 1);
    if (tiles % 2 != 0) args.pair = 1;
    args.blocks_per_stage = tuning_.blocks_per_stage ? tuning_.blocks_per_stage : 1;
    // Split until about two blocks stand on every SM (one where the batch makes the partial sums large), but leave a
    // split at least 4 blocks of k.
    const int most_blocks = N >= 64 ? kMultiprocessors : 2 * kMultiprocessors;
    args.splits = splits ? splits : 1;
    while (splits == 0 && 2 * args.splits * args.pair <= 8 && 2 * args.splits * tiles <= most_blocks &&
           args.k_blocks / (2 * args.splits) >= 4) {
      args.splits *= 2;
    }
    // The ring: what lets two blocks stand on an SM, of this kernel or of the next one that already prefetches.
    const int other_bytes = kSendsSums<N> ? N * kSumStride * 4 : 0;
    const int budget = 1024 * (tuning_.ring_kilobytes ? tuning_.ring_kilobytes : 112) - other_bytes;
    const int stage_bytes = args.blocks_per_stage * kBlockBytes;
    const int split_blocks = (args.k_blocks + args.splits - 1) / args.splits;
    const int iterations = (split_blocks + args.blocks_per_stage - 1) / args.blocks_per_stage;
    args.stages = std::min({kMaxStages, budget / stage_bytes, iterations});
    args.ring_bytes = std::max(args.stages * stage_bytes, kSendsSums<N> ? 0 : N * kSumStride * 4);
    CUtensorMap weights_map, input_map;
    if (!map_matrix(&weights_map, matrix, static_cast<size_t>(shapes_.layers) * rows, columns, 64) ||
        !map_matrix(&input_map, input, shapes_.batch, columns, N / args.pair)) {
      return;
    }
    dim3 grid(args.splits * args.pair, (args.batch + N - 1) / N, tiles / args.pair);
    int shared_bytes = args.ring_bytes + 16 * kMaxStages + other_bytes;
    launch(name, projection_kernel<N>, grid, kProjectionThreads, shared_bytes, args.splits * args.pair, weights_map,
           input_map, args);
  }

  // A row-major [rows, columns] matrix, fetched in tiles of `tile_rows` rows of 128 bytes, swizzled.
  bool map_matrix(CUtensorMap* map, const bf16* matrix, size_t rows, int columns, int tile_rows) {
    cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), rows};
    cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
    cuuint32_t box[2] = {kBlockK, static_cast<cuuint32_t>(tile_rows)};
    return encode(map, 2, matrix, sizes, strides, box);
  }

  // The whole cache as rows of one token each, cut into halves of 128 bytes: tiles [H / 64, 16 tokens, 64].
  bool map_pages(CUtensorMap* map) {
    const int h = shapes_.head_dim;
    cuuint64_t sizes[3] = {64, shapes_.layers * (layer_elements() / h), static_cast<cuuint64_t>(h / 64)};
    cuuint64_t strides[2] = {static_cast<cuuint64_t>(h) * 2, 128};
    cuuint32_t box[3] = {64, kTileTokens, static_cast<cuuint32_t>(h / 64)};
    return encode(map, 3, cache.pages, sizes, strides, box);
  }

  bool encode(CUtensorMap* map, int rank, const bf16* data, const cuuint64_t* sizes, const cuuint64_t* strides,
              const cuuint32_t* box) {
    if (!error_.empty()) return false;
    EncodeTiled function = encode_tiled();
    cuuint32_t steps[3] = {1, 1, 1};
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (function != nullptr) {
      result = function(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<bf16*>(data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    if (result != CUDA_SUCCESS) error_ = "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result);
    return result == CUDA_SUCCESS;
  }

  // The first kernel waits for all that the stream ran before; each later one may start when its predecessor has.
  template <class... Parameters, class... Arguments>
  void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, int cluster,
              const Arguments&... arguments) {
    if (!error_.empty()) return;
    const void* function = reinterpret_cast<const void*>(kernel);
    check(name, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shared_bytes)));
    // The same split of L1 and shared memory for every kernel: an SM must be empty to change it.
    check(name, cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared));
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_;
    config.attrs = attributes;
    config.numAttrs = is_first_ ? 1 : 2;
    is_first_ = false;
    check(name, cudaLaunchKernelEx(&config, kernel, arguments...));
  }

  void check(const char* name, cudaError_t status) {
    if (status != cudaSuccess && error_.empty()) {
      error_ = std::string("the ") + name + " kernel could not be launched: " + cudaGetErrorString(status);
    }
  }

  static constexpr int kMultiprocessors = 132;  // of an H100 or H200; it only shapes the launches

  Shapes shapes_;
  Tuning tuning_;
  cudaStream_t stream_;
  bool is_first_ = true;
  std::string error_;
};

}  // namespace meshserve
