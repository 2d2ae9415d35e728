// Encodes tensor maps with the driver's function, which the CUDA runtime looks up: nothing links against the driver.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

namespace meshserve {

// Returns an empty string or an error.
inline std::string encode_tensor_map(CUtensorMap* map, const void* data, int rank, const cuuint64_t* sizes,
                                     const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapDataType type,
                                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode == nullptr ? CUDA_ERROR_NOT_FOUND
                        : encode(map, type, rank, const_cast<void*>(data), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? "" : "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result);
}

}  // namespace meshserve
