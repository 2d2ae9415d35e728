#include "common/launch.cuh"

#include <atomic>

#include "common/sm90/tensor_map.cuh"

namespace meshserve {

constexpr int kMaxDynamicSharedBytes = 227 * 1024;  // per block; none of the kernels has static shared memory

int num_multiprocessors() {
  constexpr int kMostDevices = 64;
  static std::atomic<int> known[kMostDevices];  // 0: not asked yet
  int device = 0, count = 0;
  cudaGetDevice(&device);
  if (device < kMostDevices && (count = known[device]) != 0) return count;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (device < kMostDevices) known[device] = count;
  return count;
}

bool LaunchSequence::encode(CUtensorMap* map, const void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
                            const cuuint32_t* box, CUtensorMapDataType type, CUtensorMapSwizzle swizzle) {
  if (!error_.empty()) return false;
  // A promotion to 256 bytes in the L2 costs 5 % of the bandwidth.
  note(encode_tensor_map(map, data, 3, sizes, strides, box, type, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE));
  return error_.empty();
}

bool LaunchSequence::configure(const char* name, const void* function, const LaunchShape& shape,
                               cudaLaunchConfig_t* config, cudaLaunchAttribute* attributes) {
  if (!error_.empty()) return false;
  // Always sets the maximum, whatever this launch needs: o and down share a kernel, and a captured launch of one must
  // not see a limit set for the other.
  check(name, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxDynamicSharedBytes));
  // All kernels use the same split of L1 and shared memory, because an SM must be idle to change it.
  check(name,
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = shape.cluster;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  attributes[2].id = cudaLaunchAttributePriority;
  attributes[2].val.priority = shape.priority;
  if (is_first_) attributes[1] = attributes[2];
  config->gridDim = shape.grid;
  config->blockDim = dim3(shape.threads);
  config->dynamicSmemBytes = shape.shared_bytes;
  config->stream = stream_;
  config->attrs = attributes;
  config->numAttrs = (is_first_ ? 1 : 2) + (shape.priority != 0);
  is_first_ = false;
  return true;
}

void LaunchSequence::check(const char* name, cudaError_t status) {
  if (status != cudaSuccess) {
    note(std::string("the ") + name + " kernel could not be launched: " + cudaGetErrorString(status));
  }
}

}  // namespace meshserve
