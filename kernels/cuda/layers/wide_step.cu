#include "layers/wide_step.cuh"

#include <algorithm>

#include "attention/qk_norm_rope_launch.cuh"
#include "projection/quantize_launch.cuh"

namespace meshserve {
namespace wide {
namespace {

class WideStep {
 public:
  WideStep(const Call& call, const Shapes& shapes, const Tuning& tuning, cudaStream_t stream)
      : call_(call), shapes_(shapes), sequence_(stream) {
    attention_.shapes = shapes;
    attention_.cache = call.cache;
    attention_.scale = call.scale;
    attention_.splits = tuning.attention_splits;
  }

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
    q_ = reinterpret_cast<bf16*>(take(batch * s.q_columns() * sizeof(bf16)));
    attention_.unmerged.rows = reinterpret_cast<float*>(take(Scratch::unmerged_bytes(s)));
    attention_.unmerged.num_arrived = reinterpret_cast<int*>(take(batch * Scratch::arrivals(s) * sizeof(int)));
    const size_t sizes[kProducts][2] = {{static_cast<size_t>(s.qkv_rows()), static_cast<size_t>(s.embed)},
                                        {static_cast<size_t>(s.embed), static_cast<size_t>(s.q_columns())},
                                        {static_cast<size_t>(2 * s.mlp), static_cast<size_t>(s.embed)},
                                        {static_cast<size_t>(s.embed), static_cast<size_t>(s.mlp)}};
    for (int i = 0; i < kProducts; ++i) {
      arranged_[i] = reinterpret_cast<float*>(take(sizes[i][0] * (sizes[i][1] / fp8::kBlockColumns) * sizeof(float)));
    }
    workspace_ = take(cublas_lt::kWorkspaceBytes);
    attention_.rounded_scales = scales_;
    return used;
  }

  // Returns an empty string or the first error.
  std::string layers(const bf16* x, bf16* out, int first, int num_layers) {
    const Call& call = call_;
    // Every cluster of a request's parts arrives once a layer, so that one time for all layers is enough.
    const size_t num_bytes = shapes_.batch * Scratch::arrivals(shapes_) * sizeof(int);
    const cudaError_t status = cudaMemsetAsync(attention_.unmerged.num_arrived, 0, num_bytes, sequence_.stream());
    if (status != cudaSuccess) return cudaGetErrorString(status);
    for (int layer = first; layer < first + num_layers; ++layer) {
      const fp8::Matrix qkv = of_layer(call.qkv, layer), o = of_layer(call.o, layer);
      const fp8::Matrix gate_up = of_layer(call.gate_up, layer), down = of_layer(call.down, layer);
      // Scales are laid out before the wait for the product before it, where no earlier kernel still reads the place.
      const fp8::ScaleArgs first_scales = layer == first ? qkv.arrangement(arranged_[0]) : fp8::ScaleArgs();
      normalize(x, call.input_norm, layer, {first_scales, o.arrangement(arranged_[1])});
      multiply(0, qkv, nullptr, product_);
      finish_heads(layer);
      attention_.launch(sequence_, layer, q_, reinterpret_cast<bf16*>(numbers_));
      multiply(1, o, x, between_);  // never in place: cuBLASLt would round the product before it adds it
      const bool is_last = layer + 1 == first + num_layers;
      normalize(between_, call.post_norm, layer,
                {gate_up.arrangement(arranged_[2]), down.arrangement(arranged_[3]),
                 is_last ? fp8::ScaleArgs() : of_layer(call.qkv, layer + 1).arrangement(arranged_[0])});
      multiply(2, gate_up, nullptr, product_);
      fp8::launch(quantize_args(product_, shapes_.mlp), fp8::Before::kSiluProduct, sequence_);
      multiply(3, down, between_, out);
      x = out;
    }
    return sequence_.error();
  }

 private:
  static fp8::Matrix of_layer(fp8::Matrix matrix, int layer) {
    const size_t scale_bytes = matrix.is_bfloat16 ? sizeof(bf16) : sizeof(float);
    matrix.numbers += static_cast<size_t>(layer) * matrix.rows * matrix.columns;
    matrix.scales = static_cast<const uint8_t*>(matrix.scales) +
                    static_cast<size_t>(layer) * matrix.scale_rows * matrix.scale_columns * scale_bytes;
    return matrix;
  }

  fp8::QuantizeArgs quantize_args(const bf16* x, int columns) const {
    fp8::QuantizeArgs args = {};
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
    fp8::QuantizeArgs args = quantize_args(x, shapes_.embed);
    args.gain = gains + static_cast<size_t>(layer) * shapes_.embed;
    for (int i = 0; i < fp8::kMaxArranged; ++i) args.weights[i] = scales[i];
    fp8::launch(args, fp8::Before::kRmsNorm, sequence_);
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
    args.q = q_;
    args.pages = call_.cache.of_layer(shapes_, layer);
    args.num_tokens = shapes_.batch;
    args.kv_heads = shapes_.kv_heads;
    args.group = shapes_.group;
    args.max_pages = shapes_.max_pages;
    args.page_size = shapes_.page_size;
    args.epsilon = call_.epsilon;
    rope::launch(args, shapes_.head_dim, call_.cache.is_fp8, sequence_);
  }

  // out = residual (may be null) + activations weights^T. `index` is the product's number in a layer.
  void multiply(int index, const fp8::Matrix& matrix, const bf16* residual, bf16* out) {
    if (!sequence_.error().empty()) return;
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
    sequence_.note(cublas_lt::multiply(product, operands, sequence_.stream()));
  }

  const Call call_;
  const Shapes shapes_;
  LaunchSequence sequence_;
  DecodeAttention<RoundedFp8Weights> attention_ = {};
  bf16* q_ = nullptr;
  uint8_t *numbers_ = nullptr, *workspace_ = nullptr;    // e4m3 activations [B, columns]
  float *scales_ = nullptr, *arranged_[kProducts] = {};  // the activations' [columns / 128, B]; the weights'
  bf16 *product_ = nullptr, *between_ = nullptr;         // between_: the residual stream after attention [B, embed]
};

}  // namespace

size_t scratch_bytes(const Shapes& shapes) { return WideStep({}, shapes, {}, nullptr).carve(nullptr); }

std::string run_layers(const Call& call, const Shapes& shapes, const Tuning& tuning, uint8_t* scratch, const bf16* x,
                       bf16* out, int first, int num_layers, cudaStream_t stream) {
  WideStep step(call, shapes, tuning, stream);
  step.carve(scratch);
  return step.layers(x, out, first, num_layers);
}

}  // namespace wide
}  // namespace meshserve
