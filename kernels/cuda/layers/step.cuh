// The host side of a step's layers: the order of their kernels and the arguments of each.
#pragma once
#include <functional>
#include <string>

#include "attention/sm90/decode_launch.cuh"
#include "collectives/p2p_host.cuh"
#include "layers/prepare.cuh"
#include "projection/sm90/launch.cuh"

namespace meshserve {

template <class W>
struct Weights {  // stacked over layers
  const bf16* input_norm;
  typename W::Matrix qkv;
  const bf16 *q_norm, *k_norm;
  typename W::Matrix o;
  const bf16* post_norm;
  typename W::Matrix gate_up, down;
};

// Intermediate results of the kernels of one call, all in one buffer.
struct Scratch {
  bf16 *scaled, *q, *attended, *activated;
  float *sums, *cos_sin;
  Unmerged unmerged;
  PlannedPart* plan;
  int* claims;

  static int arrivals(const Shapes& shapes) { return shapes.kv_heads * kMaxSplits; }  // counters per request
  static size_t unmerged_bytes(const Shapes& shapes);
  static size_t bytes(const Shapes& shapes) { return Scratch().carve(shapes, nullptr); }
  // Divides a buffer. Returns the bytes that are needed.
  size_t carve(const Shapes& shapes, uint8_t* buffer);
};

// Launches the kernels of layers. W: the format of the weights.
template <class W>
class Step {
 public:
  using Matrix = typename W::Matrix;

  Step(const Shapes& shapes, const Tuning& tuning, cudaStream_t stream)
      : shapes_(shapes), tuning_(tuning), sequence_(stream) {}

  Weights<W> weights = {};
  Cache cache = {};
  Scratch scratch = {};
  float epsilon = 0.0f, scale = 0.0f, rotary_scale = 1.0f;
  int product_priority = 0;       // for launches of projections; a lower number is preferred
  bool has_plain_output = false;  // whether the result of `gate_up` is bf16 even if weights are quantized
  const float* inverse_frequencies = nullptr;
  int* cleared = nullptr;  // set to 0 before the first layer
  int num_cleared = 0;
  int norm_tiles = 0;  // sums of squares per token that the next norm adds up; 0: one for each 128 columns

  LaunchSequence& sequence() { return sequence_; }
  // Returns an empty string or the first error.
  const std::string& error() const { return sequence_.error(); }

  // Runs `num_layers` layers from `first` on. On a mesh, the P2P all-reduce takes two rounds per layer, so every call
  // begins with round 0. `attend(layer)` computes scratch.attended from the normed input and the pages; null: the
  // step's tokens attend as decodes.
  void layers(const bf16* x, bf16* out, int first, int num_layers, const P2PGroup* p2p,
              const std::function<void(int)>& attend = nullptr);

  // Computes x * gain, the sums of squares of x, and, if `with_angles`, the rotary angles.
  void prepare(const bf16* x, const bf16* gain, bool with_angles);
  // Clears the counters of attention's parts, and plans the parts if its blocks are persistent.
  void prepare_attention(PrepareArgs args = {});
  // Converts activations [batch, columns] to the form that a product with quantized weights needs.
  void convert(const bf16* from, bf16* to, int columns);

  // Computes scratch.attended: QKV and attention, in one kernel for few tokens.
  void attended_heads(int layer);
  void qkv(int layer, bf16* q);
  void attention(int layer, const bf16* q, bf16* out);
  // out = residual (may be null) + attended o^T. If `next_gain` is given, also computes the inputs of the next norm.
  void output(int layer, const bf16* attended, const bf16* residual, bf16* out, const bf16* next_gain);
  // The same of at most 8 tokens, with a router's scores.
  void routed_output(int layer, const bf16* attended, const bf16* residual, bf16* out, const bf16* next_gain,
                     const experts::RouterPart& part);
  void gate_up(int layer, bf16* activated);
  void down(int layer, const bf16* activated, const bf16* residual, bf16* out, const bf16* next_gain);
  // logits [batch, rows] = input head^T, with a head [rows, columns].
  void logits(const Matrix& head, int rows, int columns, const bf16* input, float* out);

 private:
  using Arguments = ArgsOf<Epilogue::kResidual, W>;  // for all projections but those that send

  // On a mesh: sends this GPU's summand of activations times a matrix to every GPU; `gather` adds them.
  void share(const char* name, int layer, const Matrix& matrix, int columns, const bf16* activations, int splits,
             const P2PGroup& p2p, int round);
  // out = residual + the summands of all GPUs. If `next_gain` is given, also computes the inputs of the next norm.
  void gather(const P2PGroup& p2p, int round, const bf16* residual, bf16* out, const bf16* next_gain);

  int merged_splits() const;
  template <Epilogue E>
  void merged_heads(int layer, int splits);
  DecodeAttention<InputFormat<W>> decode_attention() const;
  Projection projection(const char* name, int rows, int columns, int tiles, const bf16* input, int splits) const;

  template <class Args = Arguments>
  Args base() const;
  template <class Args = Arguments>
  Args normed() const;
  template <class Args = Arguments>
  Args residual_args(int layer, const bf16* residual, bf16* out, const bf16* next_gain) const;
  template <class Args>
  Args qkv_args(int layer) const;

  Shapes shapes_;
  Tuning tuning_;
  LaunchSequence sequence_;
  bool is_mesh_ = false;
};

}  // namespace meshserve
