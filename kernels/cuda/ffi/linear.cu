// The XLA FFI calls of single products with FP8 weights. fp8_linear multiplies on the FP8 tensor cores: one kernel
// rounds the activations to FP8 and lays out the scales of the weights if they do not lie as cuBLASLt reads them
// (quantize.cuh); then cuBLASLt multiplies (cublas_lt.cuh). output_head and output_head_wide compute logits; the latter
// reads the head once for 128 tokens (wide_head.cuh).
#include "ffi/arguments.cuh"
#include "layers/step.cuh"
#include "projection/fp8_matrix.cuh"
#include "projection/quantize_launch.cuh"
#include "projection/sm90/wide_head_launch.cuh"

namespace meshserve {
namespace {

ffi::Error invalid(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, text); }

// out = [residual +] x weights^T. `gain` is read only if there is a norm `before`, and `residual` only if
// `has_residual`. `numbers` and `scales` are x in FP8, padded to a multiple of 4 tokens; `arranged` has the scales of
// the weights, if they are laid out anew.
ffi::Error fp8_linear(cudaStream_t stream, In x, In gain, In weights, In scale, In residual, Out out, Out numbers,
                      Out scales, Out arranged, Out workspace, int32_t before, float epsilon, int32_t has_residual,
                      int32_t is_spread, int32_t candidate) {
  const int columns = static_cast<int>(weights.dimensions().back());
  const int rows = static_cast<int>(weights.element_count() / columns);
  const int column_blocks = static_cast<int>(scale.dimensions().back());
  const bool is_per_row = column_blocks == 1 && static_cast<int64_t>(scale.element_count()) == rows;
  if (!is_per_row && column_blocks * fp8::kBlockColumns != columns) return invalid("scales are not for 128 columns");
  if (columns > fp8::kMaxColumns) return invalid(std::to_string(columns) + " columns are too many");
  if (workspace->size_bytes() < cublas_lt::kWorkspaceBytes) return invalid("the workspace is too small");
  const cublas_lt::ScaleMode mode = is_spread    ? cublas_lt::kPer128
                                    : is_per_row ? cublas_lt::kPerRow
                                                 : cublas_lt::kPerBlock;
  fp8::QuantizeArgs args = {};
  args.x = static_cast<const bf16*>(x.untyped_data());
  args.gain = static_cast<const bf16*>(gain.untyped_data());
  args.numbers = static_cast<uint8_t*>(numbers->untyped_data());
  args.scales = static_cast<float*>(scales->untyped_data());
  args.tokens = static_cast<int>(x.dimensions()[0]);
  args.rows = static_cast<int>(numbers->dimensions()[0]);
  args.columns = columns;
  args.copies = static_cast<int>(scales->dimensions()[0]);
  args.epsilon = epsilon;
  fp8::Matrix matrix = {};
  matrix.scales = scale.untyped_data();
  matrix.rows = rows;
  matrix.columns = columns;
  matrix.scale_rows = static_cast<int>(scale.element_count() / column_blocks);
  matrix.scale_columns = column_blocks;
  matrix.is_bfloat16 = scale.element_type() == ffi::DataType::BF16;
  matrix.mode = mode;
  args.weights[0] = matrix.arrangement(static_cast<float*>(arranged->untyped_data()));
  const cudaError_t status = fp8::launch(args, static_cast<fp8::Before>(before), is_per_row, stream);
  if (status != cudaSuccess) return result(status);

  cublas_lt::Operands operands = {};
  operands.weights = weights.untyped_data();
  operands.weight_scales =
      args.weights[0].out != nullptr ? args.weights[0].out : static_cast<const float*>(scale.untyped_data());
  operands.x = args.numbers;
  operands.x_scales = args.scales;
  operands.residual = has_residual ? residual.untyped_data() : nullptr;
  operands.out = out->untyped_data();
  operands.workspace = workspace->untyped_data();
  const cudaDataType_t out_type = out->element_type() == ffi::DataType::F32 ? CUDA_R_32F : CUDA_R_16BF;
  const cublas_lt::Product product = {args.rows, rows, columns, mode, out_type, candidate};
  return result(cublas_lt::multiply(product, operands, stream));
}

// logits = input weights^T, in float32. `converted` is scratch memory for the input.
ffi::Error output_head(cudaStream_t stream, In input, In weights, In scales, Out logits, Out converted) {
  Shapes shapes;
  shapes.layers = 1;
  shapes.batch = size(input, 0);
  const int columns = size(input, 1);
  const size_t needed = activation_bytes(shapes.batch, columns);
  if (converted->element_count() < needed) return too_small(needed);
  Step<SplitFp8Weights> step(shapes, {}, stream);
  step.convert(data<bf16>(input), data<bf16>(converted), columns);
  step.logits(matrix_of(weights, scales, scales), size(weights, 0), columns, data<bf16>(converted),
              data<float>(logits));
  return result(step);
}

// logits = input weights^T, in float32, of FP8 weights with a scale for each row.
ffi::Error output_head_wide(cudaStream_t stream, In input, In weights, In scales, Out logits, Out numbers, Out powers) {
  wide_head::Call call = {};
  call.input = data<bf16>(input);
  call.weights = matrix_of(weights, scales, scales);
  call.logits = data<float>(logits);
  call.numbers = data<uint8_t>(numbers);
  call.powers = data<float>(powers);
  call.tokens = size(input, 0);
  call.rows = size(weights, 0);
  call.columns = size(input, 1);
  return result(wide_head::launch(call, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_fp8_linear, fp8_linear,
                              bind(operands<5>, results<5>)
                                  .Attr<int32_t>("before")
                                  .Attr<float>("epsilon")
                                  .Attr<int32_t>("has_residual")
                                  .Attr<int32_t>("is_spread")
                                  .Attr<int32_t>("candidate"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_output_head, output_head, bind(operands<3>, results<2>),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_output_head_wide, output_head_wide, bind(operands<3>, results<3>),
                              {ffi::Traits::kCmdBufferCompatible});

// Opens cuBLASLt for CUDA devices. Writes a failure to `error`; returns whether this succeeded.
extern "C" int meshserve_open_cublas_lt(const char* path, const int* ordinals, int num, char* error, int size) {
  const std::string text = cublas_lt::open(path, ordinals, num);
  snprintf(error, size, "%s", text.c_str());
  return text.empty();
}

}  // namespace meshserve
