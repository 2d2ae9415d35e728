// The XLA FFI call of decode layers of many tokens with FP8 weights (wide_step.cuh).
#include "ffi/arguments.cuh"
#include "layers/wide_step.cuh"

namespace meshserve {
namespace {

// Returns a stacked matrix.
fp8::Matrix fp8_matrix(const In& data, const In& scale, bool is_spread) {
  const int layers = size(data, 0);
  fp8::Matrix matrix = {};
  matrix.numbers = meshserve::data<uint8_t>(data);
  matrix.scales = scale.untyped_data();
  matrix.columns = static_cast<int>(data.dimensions().back());
  matrix.rows = static_cast<int>(data.element_count() / matrix.columns) / layers;
  matrix.scale_columns = static_cast<int>(scale.dimensions().back());
  matrix.scale_rows = static_cast<int>(scale.element_count() / matrix.scale_columns) / layers;
  matrix.is_bfloat16 = scale.element_type() == ffi::DataType::BF16;
  matrix.mode = is_spread ? cublas_lt::kPer128 : cublas_lt::kPerBlock;
  return matrix;
}

// `is_spread` says of each matrix whether cuBLASLt is given a scale for each row, and `candidates` which of its
// algorithms multiplies.
ffi::Error decode_layers_wide(cudaStream_t stream, In x, In input_norm, In qkv, In qkv_scale, In q_norm, In k_norm,
                              In o, In o_scale, In post_norm, In gate_up, In gate_up_scale, In down, In down_scale,
                              In cache, In page_table, In positions, In cosines, In sines, Out x_out, Out cache_out,
                              Out scratch, int32_t first_layer, int32_t num_layers, float epsilon, float scale,
                              Ints is_spread, Ints candidates, Ints tuning) {
  if (is_spread.size() != wide::kProducts || candidates.size() != wide::kProducts) {
    return result("is_spread and candidates need a value for each matrix");
  }
  Shapes shapes;
  add_cache(shapes, cache, page_table);
  shapes.batch = size(x, 0);
  shapes.embed = size(x, 1);
  shapes.group = size(qkv, 2) / shapes.head_dim - 2;
  shapes.mlp = size(gate_up, 2);
  if (shapes.head_dim != 128) return result("heads of 128 elements are needed");
  wide::Call call = {};
  const int* spread = is_spread.begin();
  call.qkv = fp8_matrix(qkv, qkv_scale, spread[0]);
  call.o = fp8_matrix(o, o_scale, spread[1]);
  call.gate_up = fp8_matrix(gate_up, gate_up_scale, spread[2]);
  call.down = fp8_matrix(down, down_scale, spread[3]);
  call.input_norm = data<bf16>(input_norm);
  call.q_norm = data<bf16>(q_norm);
  call.k_norm = data<bf16>(k_norm);
  call.post_norm = data<bf16>(post_norm);
  call.cache = {data<void>(cache_out), is_fp8(cache), data<int>(page_table), data<int>(positions)};
  call.candidates = candidates.begin();
  call.cosines = data<float>(cosines);
  call.sines = data<float>(sines);
  call.epsilon = epsilon;
  call.scale = scale;
  const size_t needed = wide::scratch_bytes(shapes);
  if (needed > scratch->element_count()) return too_small(needed);
  return result(wide::run_layers(call, shapes, tuning_of(tuning), data<uint8_t>(scratch), data<bf16>(x),
                                 data<bf16>(x_out), first_layer, num_layers, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_decode_layers_wide, decode_layers_wide,
                              bind(operands<18>, results<3>)
                                  .Attr<int32_t>("first_layer")
                                  .Attr<int32_t>("num_layers")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale")
                                  .Attr<Ints>("is_spread")
                                  .Attr<Ints>("candidates")
                                  .Attr<Ints>("tuning"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve
