// The names and values below are those of cuBLASLt's public interface, which NVIDIA keeps stable between releases, so
// that its header is not needed.
#include "projection/cublas_lt.cuh"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

namespace meshserve::cublas_lt {
namespace {

constexpr size_t kMinVersion = 120900;  // the first with scales for blocks of 128 columns on Hopper
constexpr int kMaxCandidates = 16;

constexpr int kCompute32F = 68, kTransposed = 1;
enum DescAttribute { kTransposeA = 3, kScalePointerA = 17, kScalePointerB = 18, kScaleModeA = 31, kScaleModeB = 32 };
constexpr int kMaxWorkspaceBytes = 1;  // an attribute of the preferences
enum ConfigAttribute { kAlgorithmId = 0, kTile = 1, kStages = 6, kCluster = 8 };

using Handle = void*;
struct Algorithm {
  uint64_t data[8];
};
struct Candidate {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

// The functions of the library.
struct Library {
  size_t (*version)();
  int (*create)(Handle*);
  const char* (*status_text)(int);
  int (*create_product)(void**, int, cudaDataType_t);
  int (*set_product)(void*, int, const void*, size_t);
  int (*create_layout)(void**, cudaDataType_t, uint64_t, uint64_t, int64_t);
  int (*create_preference)(void**);
  int (*set_preference)(void*, int, const void*, size_t);
  int (*candidates)(Handle, void*, void*, void*, void*, void*, void*, int, Candidate*, int*);
  int (*create_algorithm)(Handle, int, int, int, int, int, int, int, Algorithm*);
  int (*configuration)(const Algorithm*, int, void*, size_t, size_t*);
  int (*configure)(Algorithm*, int, const void*, size_t);
  int (*check)(Handle, void*, void*, void*, void*, void*, const Algorithm*, Candidate*);
  int (*multiply)(Handle, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                  void*, void*, const Algorithm*, void*, size_t, cudaStream_t);
};

class Plans {
 public:
  std::string open(const char* path, const int* ordinals, int num) {
    std::lock_guard<std::mutex> lock(mutex_);
    void* opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) return std::string("cuBLASLt cannot be opened: ") + dlerror();
    Library found = {};
    const bool is_complete =
        find(opened, "cublasLtGetVersion", found.version) && find(opened, "cublasLtCreate", found.create) &&
        find(opened, "cublasLtGetStatusString", found.status_text) &&
        find(opened, "cublasLtMatmulDescCreate", found.create_product) &&
        find(opened, "cublasLtMatmulDescSetAttribute", found.set_product) &&
        find(opened, "cublasLtMatrixLayoutCreate", found.create_layout) &&
        find(opened, "cublasLtMatmulPreferenceCreate", found.create_preference) &&
        find(opened, "cublasLtMatmulPreferenceSetAttribute", found.set_preference) &&
        find(opened, "cublasLtMatmulAlgoGetHeuristic", found.candidates) &&
        find(opened, "cublasLtMatmulAlgoInit", found.create_algorithm) &&
        find(opened, "cublasLtMatmulAlgoConfigGetAttribute", found.configuration) &&
        find(opened, "cublasLtMatmulAlgoConfigSetAttribute", found.configure) &&
        find(opened, "cublasLtMatmulAlgoCheck", found.check) && find(opened, "cublasLtMatmul", found.multiply);
    if (!is_complete) return std::string(path) + " lacks functions of cuBLASLt";
    if (found.version() < kMinVersion) {
      return "cuBLASLt is version " + std::to_string(found.version()) + "; FP8 products with block scales need " +
             std::to_string(kMinVersion) + " (CUDA 12.9) or later";
    }
    library_ = found;
    int before = 0;
    cudaError_t status = cudaGetDevice(&before);
    for (int i = 0; i < num && status == cudaSuccess; ++i) {
      status = cudaSetDevice(ordinals[i]);
      if (status != cudaSuccess) break;
      const int failure = handles_.count(ordinals[i]) ? 0 : library_.create(&handles_[ordinals[i]]);
      if (failure != 0) return describe("a handle could not be created", failure);
    }
    const cudaError_t restored = cudaSetDevice(before);
    if (status == cudaSuccess) status = restored;
    return status == cudaSuccess ? "" : cudaGetErrorString(status);
  }

  std::string multiply(const Product& product, const Operands& operands, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);  // a plan holds the addresses of the scales
    int device = 0;
    const cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return cudaGetErrorString(status);
    const auto handle = handles_.find(device);
    if (handle == handles_.end()) return "cuBLASLt has not been opened for GPU " + std::to_string(device);
    Plan& plan = plans_[product.key(device)];
    if (plan.product == nullptr) {
      const int failure = make(plan, product);
      if (failure != 0) return describe("no plan could be made", failure);
    }
    library_.set_product(plan.product, kScalePointerA, &operands.weight_scales, sizeof(void*));
    library_.set_product(plan.product, kScalePointerB, &operands.x_scales, sizeof(void*));
    if (plan.candidates.empty()) {
      plan.candidates.resize(kMaxCandidates);
      int num = 0;
      const int failure = library_.candidates(handle->second, plan.product, plan.weights, plan.x, plan.out, plan.out,
                                              plan.preference, kMaxCandidates, plan.candidates.data(), &num);
      plan.candidates.resize(failure == 0 ? num : 0);
      if (plan.candidates.empty()) {
        return describe("no algorithm for " + std::to_string(product.tokens) + " tokens, " +
                            std::to_string(product.rows) + " rows and " + std::to_string(product.columns) + " columns",
                        failure);
      }
      if (product.tile() != 0) shape(handle->second, plan, product);
    }
    const float one = 1.0f, share = operands.residual != nullptr ? 1.0f : 0.0f;
    const void* residual = operands.residual != nullptr ? operands.residual : operands.out;
    const size_t index = product.tile() != 0 ? 0 : std::min<size_t>(product.candidate, plan.candidates.size() - 1);
    const int failure =
        library_.multiply(handle->second, plan.product, &one, operands.weights, plan.weights, operands.x, plan.x,
                          &share, residual, plan.out, operands.out, plan.out, &plan.candidates[index].algorithm,
                          operands.workspace, kWorkspaceBytes, stream);
    return failure == 0 ? "" : describe("the product failed", failure);
  }

 private:
  struct Plan {
    void *product = nullptr, *weights = nullptr, *x = nullptr, *out = nullptr, *preference = nullptr;
    std::vector<Candidate> candidates;
  };

  template <class Function>
  static bool find(void* opened, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(opened, name));
    return function != nullptr;
  }

  std::string describe(const std::string& what, int status) const {
    return "cuBLASLt: " + what + ": " + library_.status_text(status);
  }

  // Returns cuBLASLt's status; 0 is success. Sums are float32; without fast accumulation, which is off by default, FP8
  // tensor cores' partial sums are added up in float32 registers after at most 128 columns.
  int make(Plan& plan, const Product& p) {
    const int transposed = kTransposed;
    const int x_mode = p.weight_mode == kPerRow ? kPerRow : kPer128, weight_mode = p.weight_mode;
    const uint64_t workspace_bytes = kWorkspaceBytes;
    int failure = library_.create_product(&plan.product, kCompute32F, CUDA_R_32F);
    const auto then = [&](int status) { failure = failure != 0 ? failure : status; };
    then(library_.set_product(plan.product, kTransposeA, &transposed, sizeof(int)));
    then(library_.set_product(plan.product, kScaleModeA, &weight_mode, sizeof(int)));
    then(library_.set_product(plan.product, kScaleModeB, &x_mode, sizeof(int)));
    then(library_.create_layout(&plan.weights, CUDA_R_8F_E4M3, p.columns, p.rows, p.columns));
    then(library_.create_layout(&plan.x, CUDA_R_8F_E4M3, p.columns, p.tokens, p.columns));
    then(library_.create_layout(&plan.out, p.out_type, p.rows, p.tokens, p.rows));
    then(library_.create_preference(&plan.preference));
    then(library_.set_preference(plan.preference, kMaxWorkspaceBytes, &workspace_bytes, sizeof(workspace_bytes)));
    return failure;
  }

  // Gives the first candidate the tile and the cluster of a product, without ranges of columns, if cuBLASLt takes them.
  void shape(Handle handle, Plan& plan, const Product& p) const {
    const uint32_t tile = p.tile();
    const uint16_t cluster = p.candidate % 256;
    const Algorithm& first = plan.candidates[0].algorithm;
    Algorithm shaped = {};
    Candidate found = {};
    int id = 0, status = 0;
    uint32_t stages = 0;
    size_t written = 0;
    const auto then = [&](int next) { status = status != 0 ? status : next; };
    then(library_.configuration(&first, kAlgorithmId, &id, sizeof(id), &written));
    then(library_.configuration(&first, kStages, &stages, sizeof(stages), &written));
    then(library_.create_algorithm(handle, kCompute32F, CUDA_R_32F, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, p.out_type,
                                   p.out_type, id, &shaped));
    then(library_.configure(&shaped, kTile, &tile, sizeof(tile)));
    then(library_.configure(&shaped, kStages, &stages, sizeof(stages)));
    then(library_.configure(&shaped, kCluster, &cluster, sizeof(cluster)));
    if (status != 0) return;
    status = library_.check(handle, plan.product, plan.weights, plan.x, plan.out, plan.out, &shaped, &found);
    if (status == 0 && found.workspace_bytes <= kWorkspaceBytes) plan.candidates[0].algorithm = shaped;
  }

  std::mutex mutex_;
  Library library_ = {};
  std::map<int, Handle> handles_;
  std::map<decltype(Product().key(0)), Plan> plans_;
};

Plans& all_plans() {
  static Plans* plans = new Plans;  // never destroyed: programs may run until the process ends
  return *plans;
}

}  // namespace

std::string open(const char* path, const int* ordinals, int num) { return all_plans().open(path, ordinals, num); }

std::string multiply(const Product& product, const Operands& operands, cudaStream_t stream) {
  return all_plans().multiply(product, operands, stream);
}

}  // namespace meshserve::cublas_lt
