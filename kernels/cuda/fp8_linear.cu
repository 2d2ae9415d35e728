// The XLA FFI call fp8_linear: a product of activations with FP8 weights on the FP8 tensor cores. One kernel rounds the
// activations to FP8 and lays out the scales of the weights if they do not lie as cuBLASLt reads them (quantise.cuh);
// then cuBLASLt multiplies (cublas_lt.cuh). Like the calls of ffi.cu, it launches the same kernels for the same shapes,
// so it can be captured in a command buffer.
#include "fp8_matrix.cuh"
#include "xla/ffi/api/ffi.h"

namespace meshserve {
namespace {

namespace ffi = xla::ffi;
using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

ffi::Error invalid(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, text); }
ffi::Error failed(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInternal, text); }

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
  fp8::QuantiseArgs args = {};
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
  const fp8::QuantiseLaunch launch = fp8::launch_of(args, static_cast<fp8::Before>(before), is_per_row);
  launch.kernel<<<launch.grid, launch.threads, launch.shared_bytes, stream>>>(args);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return failed(cudaGetErrorString(status));

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
                                  .Attr<int32_t>("is_spread")
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
