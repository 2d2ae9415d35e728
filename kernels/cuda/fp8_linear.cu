// The XLA FFI call fp8_linear: a product of activations with FP8 weights on the FP8 tensor cores. It rounds the
// activations to FP8 (quantise.cuh), lays out the scales of the weights if they do not lie as cuBLASLt reads them, and
// multiplies (cublas_lt.cuh). Like the calls of ffi.cu, it launches the same kernels for the same shapes, so it can be
// captured in a command buffer.
#include "cublas_lt.cuh"
#include "quantise.cuh"
#include "xla/ffi/api/ffi.h"

namespace meshserve {
namespace {

namespace ffi = xla::ffi;
using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

ffi::Error invalid(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, text); }
ffi::Error failed(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInternal, text); }

// Lays out the weights' scales [row_blocks, column_blocks] for a mode, or takes them as they are.
cudaError_t weight_scales(cudaStream_t stream, const In& scale, int rows, int row_blocks, int column_blocks,
                          cublas_lt::ScaleMode mode, float* scratch, const float** result) {
  const int stride = mode == cublas_lt::kPerBlock ? (column_blocks + 3) / 4 * 4 : column_blocks;
  const bool is_float = scale.element_type() == ffi::DataType::F32;
  *result = static_cast<const float*>(scale.untyped_data());
  if (is_float && stride == column_blocks && mode != cublas_lt::kPer128) return cudaSuccess;
  *result = scratch;
  fp8::ScaleArgs args = {};
  args.scales = scale.untyped_data();
  args.out = scratch;
  args.rows = row_blocks;
  args.columns = column_blocks;
  args.stride = stride;
  args.is_bfloat16 = !is_float;
  args.is_transposed = mode == cublas_lt::kPer128;
  args.repeats = args.is_transposed ? rows / row_blocks : 1;
  return fp8::arrange_scales(args, stream);
}

ffi::Error fp8_linear(cudaStream_t stream, In x, In gain, In weights, In scale, In residual, Out out, Out numbers,
                      Out scales, Out arranged, Out workspace, int32_t before, float epsilon, int32_t has_residual,
                      int32_t candidate) {
  const auto shape = weights.dimensions(), grid = scale.dimensions();
  const int columns = static_cast<int>(shape.back()), column_blocks = static_cast<int>(grid.back());
  const int rows = static_cast<int>(weights.element_count() / columns);
  const int row_blocks = static_cast<int>(scale.element_count() / column_blocks);
  const bool is_per_row = column_blocks == 1 && row_blocks == rows;
  const int padded = static_cast<int>(numbers->dimensions()[0]);
  if (!is_per_row && column_blocks * fp8::kBlockColumns != columns) return invalid("scales are not for 128 columns");
  if (columns > fp8::kMaxColumns) return invalid(std::to_string(columns) + " columns are too many");
  if (workspace->size_bytes() < cublas_lt::kWorkspaceBytes) return invalid("the workspace is too small");
  const cublas_lt::ScaleMode mode = is_per_row                                        ? cublas_lt::kPerRow
                                    : row_blocks * fp8::kBlockColumns == rows         ? cublas_lt::kPerBlock
                                                                                      : cublas_lt::kPer128;
  cublas_lt::Operands operands = {};
  cudaError_t status = weight_scales(stream, scale, rows, row_blocks, column_blocks, mode,
                                     static_cast<float*>(arranged->untyped_data()), &operands.weight_scales);
  if (status != cudaSuccess) return failed(cudaGetErrorString(status));

  fp8::QuantiseArgs args = {};
  args.x = static_cast<const fp8::bf16*>(x.untyped_data());
  args.gain = static_cast<const fp8::bf16*>(gain.untyped_data());
  args.numbers = static_cast<uint8_t*>(numbers->untyped_data());
  args.scales = static_cast<float*>(scales->untyped_data());
  args.tokens = static_cast<int>(x.dimensions()[0]);
  args.rows = padded;
  args.columns = columns;
  args.epsilon = epsilon;
  status = fp8::quantise(args, static_cast<fp8::Before>(before), is_per_row, stream);
  if (status != cudaSuccess) return failed(cudaGetErrorString(status));

  operands.weights = weights.untyped_data();
  operands.x = args.numbers;
  operands.x_scales = args.scales;
  operands.residual = has_residual ? residual.untyped_data() : nullptr;
  operands.out = out->untyped_data();
  operands.workspace = workspace->untyped_data();
  const cudaDataType_t out_type = out->element_type() == ffi::DataType::F32 ? CUDA_R_32F : CUDA_R_16BF;
  const cublas_lt::Product product = {padded, rows, columns, mode, out_type, candidate};
  const std::string error = cublas_lt::Plans::all().multiply(product, operands, stream);
  return error.empty() ? ffi::Error::Success() : failed(error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_fp8_linear, fp8_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<In>()  // x
                                  .Arg<In>()  // gain of the norm before it; read only if there is one
                                  .Arg<In>()  // weights
                                  .Arg<In>()  // their scales
                                  .Arg<In>()  // residual, added to the product; read only if there is one
                                  .Ret<In>()  // product
                                  .Ret<In>()  // x in FP8, padded to a multiple of 4 tokens
                                  .Ret<In>()  // its scales
                                  .Ret<In>()  // scales of the weights, if they are laid out anew
                                  .Ret<In>()  // workspace
                                  .Attr<int32_t>("before")
                                  .Attr<float>("epsilon")
                                  .Attr<int32_t>("has_residual")
                                  .Attr<int32_t>("candidate"),
                              {ffi::Traits::kCmdBufferCompatible});

// Opens cuBLASLt and loads the kernels of this file onto CUDA devices. Writes a failure to `error`; returns whether
// this succeeded.
extern "C" int meshserve_open_cublas_lt(const char* path, const int* ordinals, int num, char* error, int size) {
  std::string text = cublas_lt::Plans::all().open(path, ordinals, num);
  int current = 0;
  cudaError_t status = num > 0 ? cudaGetDevice(&current) : cudaSuccess;
  for (int i = 0; i < num && status == cudaSuccess; ++i) {
    status = cudaSetDevice(ordinals[i]);
    cudaFuncAttributes attributes;
    const auto load = [&](auto* kernel) {
      if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    };
    load(fp8::arrange_scales_kernel);
    for (const auto before : {fp8::Before::kNothing, fp8::Before::kRmsNorm, fp8::Before::kSiluProduct}) {
      load(fp8::chunk_kernel_for(before));
      for (const int vectors : {1, 2, 4, 8}) {
        load(fp8::row_kernel_for(before, false, vectors));
        load(fp8::row_kernel_for(before, true, vectors));
      }
    }
  }
  if (num > 0) cudaSetDevice(current);
  if (text.empty() && status != cudaSuccess) text = cudaGetErrorString(status);
  snprintf(error, size, "%s", text.c_str());
  return text.empty();
}

}  // namespace meshserve
