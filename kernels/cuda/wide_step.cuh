// The host side of decode layers of more tokens than the products of projection.cuh take, with FP8 weights.
//
// cuBLASLt multiplies (cublas_lt.cuh), by activations that are rounded to e4m3 with a scale for each 128 columns of a
// token. A kernel between two products does all that is between them: the norm, or SiLU, with the rounding
// (quantise.cuh); or the norms, rotation and writing of heads (qk_norm_rope.cuh), beside which attention already
// fetches earlier tokens' pages. Attention rounds its result itself. Our kernels are launched early behind cuBLASLt's,
// so that the latency of their launch is hidden.
#pragma once
#include "fp8_matrix.cuh"
#include "launch.cuh"
#include "qk_norm_rope.cuh"

namespace meshserve {
namespace wide {

constexpr int kProducts = 4;  // of a layer: QKV, output, gate and up, down

struct Call {
  fp8::Matrix qkv, o, gate_up, down;                     // of the first layer of the stack
  const bf16 *input_norm, *q_norm, *k_norm, *post_norm;  // stacked over layers
  const int* candidates;                                 // of cuBLASLt's algorithms, for each matrix
  Cache cache;
  const float *cosines, *sines;  // [B, H / 2]
  float epsilon, scale;
};

// Runs layers. The batch is a multiple of 16 tokens, of a request each.
class WideStep {
 public:
  WideStep(const Shapes& shapes, const Tuning& tuning, cudaStream_t stream)
      : step_(shapes, tuning, stream), shapes_(shapes), stream_(stream) {}

  static size_t bytes(const Shapes& shapes) { return WideStep(shapes, {}, nullptr).carve(nullptr); }

  // Divides the scratch memory. Returns the bytes that are needed.
  size_t carve(uint8_t* buffer) {
    size_t used = 0;
    const auto take = [&](size_t bytes) {
      uint8_t* at = buffer + used;
      used += (bytes + 255) / 256 * 256;
      return at;
    };
    const Shapes& s = shapes_;
    const size_t batch = s.batch, widest = std::max({s.embed, s.q_columns(), s.mlp});
    numbers_ = take(batch * widest);
    scales_ = reinterpret_cast<float*>(take(batch * (widest / fp8::kBlockColumns) * sizeof(float)));
    product_ = reinterpret_cast<bf16*>(take(batch * std::max(s.qkv_rows(), 2 * s.mlp) * sizeof(bf16)));
    between_ = reinterpret_cast<bf16*>(take(batch * s.embed * sizeof(bf16)));
    step_.scratch.q = reinterpret_cast<bf16*>(take(batch * s.q_columns() * sizeof(bf16)));
    step_.scratch.unmerged.rows = reinterpret_cast<float*>(take(Scratch::unmerged_bytes(s)));
    step_.scratch.unmerged.num_arrived = reinterpret_cast<int*>(take(batch * s.arrivals() * sizeof(int)));
    const size_t sizes[kProducts][2] = {{static_cast<size_t>(s.qkv_rows()), static_cast<size_t>(s.embed)},
                                        {static_cast<size_t>(s.embed), static_cast<size_t>(s.q_columns())},
                                        {static_cast<size_t>(2 * s.mlp), static_cast<size_t>(s.embed)},
                                        {static_cast<size_t>(s.embed), static_cast<size_t>(s.mlp)}};
    for (int i = 0; i < kProducts; ++i) {
      arranged_[i] = reinterpret_cast<float*>(take(sizes[i][0] * (sizes[i][1] / fp8::kBlockColumns) * sizeof(float)));
    }
    workspace_ = take(cublas_lt::kWorkspaceBytes);
    return used;
  }

  // Returns an empty string or the first error.
  std::string layers(const Call& call, const bf16* x, bf16* out, int first, int num_layers) {
    call_ = call;
    step_.cache = call.cache;
    step_.scale = call.scale;
    step_.rounded_scales = scales_;
    // Every cluster of a request's parts arrives once a layer, so that one time for all layers is enough.
    const size_t num_bytes = shapes_.batch * shapes_.arrivals() * sizeof(int);
    const cudaError_t status = cudaMemsetAsync(step_.scratch.unmerged.num_arrived, 0, num_bytes, stream_);
    if (status != cudaSuccess) return cudaGetErrorString(status);
    for (int layer = first; layer < first + num_layers; ++layer) {
      const fp8::Matrix qkv = of_layer(call.qkv, layer), o = of_layer(call.o, layer);
      const fp8::Matrix gate_up = of_layer(call.gate_up, layer), down = of_layer(call.down, layer);
      // Scales are laid out before the wait for the product before it, where no earlier kernel still reads the place.
      const fp8::ScaleArgs first_scales = layer == first ? qkv.arrangement(arranged_[0]) : fp8::ScaleArgs();
      normalize(x, call.input_norm, layer, {first_scales, o.arrangement(arranged_[1])});
      multiply(0, qkv, nullptr, product_);
      finish_heads(layer);
      step_.attention(layer, step_.scratch.q, reinterpret_cast<bf16*>(numbers_));
      multiply(1, o, x, between_);  // never in place: cuBLASLt would round the product before it adds it
      const bool is_last = layer + 1 == first + num_layers;
      normalize(between_, call.post_norm, layer,
                {gate_up.arrangement(arranged_[2]), down.arrangement(arranged_[3]),
                 is_last ? fp8::ScaleArgs() : of_layer(call.qkv, layer + 1).arrangement(arranged_[0])});
      multiply(2, gate_up, nullptr, product_);
      round(fp8::Before::kSiluProduct, quantise_args(product_, shapes_.mlp));
      multiply(3, down, between_, out);
      x = out;
    }
    return step_.error();
  }

 private:
  static fp8::Matrix of_layer(fp8::Matrix matrix, int layer) {
    const size_t scale_bytes = matrix.is_bfloat16 ? sizeof(bf16) : sizeof(float);
    matrix.numbers += static_cast<size_t>(layer) * matrix.rows * matrix.columns;
    matrix.scales = static_cast<const uint8_t*>(matrix.scales) +
                    static_cast<size_t>(layer) * matrix.scale_rows * matrix.scale_columns * scale_bytes;
    return matrix;
  }

  fp8::QuantiseArgs quantise_args(const bf16* x, int columns) const {
    fp8::QuantiseArgs args = {};
    args.x = x;
    args.numbers = numbers_;
    args.scales = scales_;
    args.tokens = args.rows = shapes_.batch;
    args.columns = columns;
    args.epsilon = call_.epsilon;
    return args;
  }

  // Also lays out the scales of weights of later products.
  void normalize(const bf16* x, const bf16* gains, int layer, const fp8::ScaleArgs (&scales)[fp8::kMaxArranged]) {
    fp8::QuantiseArgs args = quantise_args(x, shapes_.embed);
    args.gain = gains + static_cast<size_t>(layer) * shapes_.embed;
    for (int i = 0; i < fp8::kMaxArranged; ++i) args.weights[i] = scales[i];
    round(fp8::Before::kRmsNorm, args);
  }

  void round(fp8::Before before, const fp8::QuantiseArgs& args) {
    const fp8::QuantiseLaunch launch = fp8::launch_of(args, before, false);
    step_.launch("quantise", launch.kernel, launch.grid, launch.threads, launch.shared_bytes, 1, args);
  }

  void finish_heads(int layer) {
    rope::Args args = {};
    const size_t norm = static_cast<size_t>(layer) * shapes_.head_dim;
    args.rows = product_;
    args.q_gain = call_.q_norm + norm;
    args.k_gain = call_.k_norm + norm;
    args.cosines = call_.cosines;
    args.sines = call_.sines;
    args.positions = call_.cache.positions;
    args.page_table = call_.cache.page_table;
    args.q = step_.scratch.q;
    args.pages = step_.layer_pages(layer);
    args.num_tokens = shapes_.batch;
    args.kv_heads = shapes_.kv_heads;
    args.group = shapes_.group;
    args.max_pages = shapes_.max_pages;
    args.page_size = shapes_.page_size;
    args.epsilon = call_.epsilon;
    const auto kernel = call_.cache.is_fp8 ? rope::qk_norm_rope_kernel<128, Fp8Cache> : rope::qk_norm_rope_kernel<128>;
    const int num_threads = args.num_tokens * args.kv_heads * (shapes_.head_dim / 4);
    step_.launch("heads", kernel, dim3((num_threads + rope::kThreads - 1) / rope::kThreads), rope::kThreads, 0, 1,
                 args);
  }

  // out = residual (may be null) + activations weights^T. `index` is the product's number in a layer.
  void multiply(int index, const fp8::Matrix& matrix, const bf16* residual, bf16* out) {
    if (!step_.error().empty()) return;
    cublas_lt::Operands operands = {};
    operands.weights = matrix.numbers;
    const float* arranged = matrix.arrangement(arranged_[index]).out;
    operands.weight_scales = arranged != nullptr ? arranged : static_cast<const float*>(matrix.scales);
    operands.x = numbers_;
    operands.x_scales = scales_;
    operands.residual = residual;
    operands.out = out;
    operands.workspace = workspace_;
    const cublas_lt::Product product = {shapes_.batch, matrix.rows, matrix.columns,
                                        matrix.mode,   CUDA_R_16BF, call_.candidates[index]};
    step_.note(cublas_lt::Plans::all().multiply(product, operands, stream_));
  }

  StepOf<RoundedFp8Weights> step_;
  Shapes shapes_;
  cudaStream_t stream_;
  Call call_ = {};
  uint8_t *numbers_ = nullptr, *workspace_ = nullptr;    // e4m3 activations [B, columns]
  float *scales_ = nullptr, *arranged_[kProducts] = {};  // of the activations [columns / 128, B]; of weights
  bf16 *product_ = nullptr, *between_ = nullptr;         // between_: the residual stream after attention [B, embed]
};

inline std::vector<const void*> kernels() {
  std::vector<const void*> kernels;
  const auto add = [&](auto* kernel) { kernels.push_back(reinterpret_cast<const void*>(kernel)); };
  add(attention_kernel<128, RoundedFp8Weights>);
  add(attention_kernel<128, RoundedFp8Weights, Fp8Cache>);
  add(attention_kernel<128, RoundedFp8Weights, LongFp8Cache>);
  return kernels;
}

}  // namespace wide
}  // namespace meshserve
