#include "collectives/p2p_host.cuh"

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "common/launch.cuh"

namespace meshserve {
namespace {

class P2PMesh {
 public:
  P2PMesh(const int* ordinals, int num, double patience_seconds)
      : ordinals_(ordinals, ordinals + num),
        patience_nanoseconds_(static_cast<unsigned long long>(patience_seconds * 1e9)) {}

  ~P2PMesh() {
    for (uint8_t* memory : memory_) cudaFree(memory);
    if (stalled_ != nullptr) cudaFreeHost(stalled_);
  }
  P2PMesh(const P2PMesh&) = delete;

  bool is(const int* ordinals, int num) const {
    return num == size() && std::equal(ordinals_.begin(), ordinals_.end(), ordinals);
  }

  // Returns an empty string or an error. The calling thread's current device does not change.
  std::string open() {
    int before = 0;
    check(cudaGetDevice(&before), "cudaGetDevice");
    check(cudaHostAlloc(&stalled_, kMaxRanks * sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable),
          "host memory");
    if (error_.empty()) std::fill(stalled_, stalled_ + kMaxRanks, 0);
    for (int ordinal : ordinals_) open_one(ordinal);
    check(cudaSetDevice(before), "cudaSetDevice");
    return error_;
  }

  // Gets the channel for the calling thread's device. Returns false if the device is not in the mesh.
  bool group(Channel channel, P2PGroup* out) const {
    int ordinal = -1;
    if (cudaGetDevice(&ordinal) != cudaSuccess) return false;
    const int rank = std::find(ordinals_.begin(), ordinals_.end(), ordinal) - ordinals_.begin(), num = size();
    if (rank == num) return false;
    *out = {};
    for (int i = 0; i < num; ++i) {
      out->inboxes[i] = memory_[(rank + i) % num] + inboxes_before(channel);
    }
    out->num = num;
    out->rank = rank;
    out->counter = reinterpret_cast<RoundCounter*>(memory_[rank] + inbox_bytes()) + static_cast<int>(channel);
    out->stalled = stalled_;
    out->patience_nanoseconds = patience_nanoseconds_;
    return true;
  }

  const int* stalled() const { return stalled_; }
  int size() const { return static_cast<int>(ordinals_.size()); }

 private:
  // The inboxes of the channels are consecutive; that of two-shot sums is last.
  size_t inboxes_before(Channel channel) const { return static_cast<int>(channel) * 2 * size() * kSlotBytes; }
  size_t inbox_bytes() const { return inboxes_before(Channel::kTwoShot) + two_shot_inbox_bytes(size()); }

  void open_one(int ordinal) {
    check(cudaSetDevice(ordinal), "cudaSetDevice");
    for (int other : ordinals_) {
      if (other == ordinal || !error_.empty()) continue;
      int can = 0;
      check(cudaDeviceCanAccessPeer(&can, ordinal, other), "cudaDeviceCanAccessPeer");
      if (error_.empty() && !can) {
        error_ = "GPU " + std::to_string(ordinal) + " cannot reach the memory of GPU " + std::to_string(other);
        return;
      }
      cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();  // clears the error, which the next launch would report otherwise
      } else {
        check(status, "cudaDeviceEnablePeerAccess");
      }
    }
    if (!error_.empty()) return;
    uint8_t* memory = nullptr;
    check(cudaMalloc(&memory, inbox_bytes() + kChannels * sizeof(RoundCounter)), "the inbox");
    if (!error_.empty()) return;
    memory_.push_back(memory);
    check(cudaMemset(memory, 0xFF, inbox_bytes()), "cudaMemset");
    check(cudaMemset(memory + inbox_bytes(), 0, kChannels * sizeof(RoundCounter)), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess && error_.empty()) error_ = std::string(what) + ": " + cudaGetErrorString(status);
  }

  std::vector<int> ordinals_;     // CUDA device ordinals, by rank
  std::vector<uint8_t*> memory_;  // by rank: the inbox of every channel, then the counter of every channel
  int* stalled_ = nullptr;
  unsigned long long patience_nanoseconds_;
  std::string error_;
};

// All meshes that were opened. They stay open until the process ends, because programs hold their addresses.
class P2PMeshes {
 public:
  std::string open(const int* ordinals, int num, double patience_seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (find(ordinals, num) != nullptr) return "";
    auto mesh = std::make_unique<P2PMesh>(ordinals, num, patience_seconds);
    std::string error = mesh->open();
    if (error.empty()) meshes_.push_back(std::move(mesh));
    return error;
  }

  // Gets the P2P group for a channel. Returns an empty string or an error.
  std::string group(const int* ordinals, int num, Channel channel, P2PGroup* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    const P2PMesh* mesh = find(ordinals, num);
    if (mesh == nullptr) return "the mesh's P2P group was not opened in this process";
    return mesh->group(channel, out) ? "" : "the call runs on a device that is not in its mesh";
  }

  // Returns 1 + the rank for which `rank` timed out waiting, or 0.
  int stalled(const int* ordinals, int num, int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    const P2PMesh* mesh = find(ordinals, num);
    return mesh == nullptr ? 0 : *const_cast<const volatile int*>(mesh->stalled() + rank);
  }

 private:
  const P2PMesh* find(const int* ordinals, int num) const {
    for (const auto& mesh : meshes_) {
      if (mesh->is(ordinals, num)) return mesh.get();
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<P2PMesh>> meshes_;
};

P2PMeshes& all_meshes() {
  static P2PMeshes* meshes = new P2PMeshes;  // never destroyed, because CUDA may shut down first
  return *meshes;
}

int blocks_at_once(int threads, int block_threads) {
  return std::min((threads + block_threads - 1) / block_threads, 2 * num_multiprocessors());
}

std::string text_of(cudaError_t status) { return status == cudaSuccess ? "" : cudaGetErrorString(status); }

}  // namespace

std::string open_p2p_group(const int* ordinals, int num, double patience_seconds) {
  if (num < 2 || num > kMaxRanks) return std::to_string(num) + " devices; a P2P group has 2 to 8";
  return all_meshes().open(ordinals, num, patience_seconds);
}

std::string find_p2p_group(const int* ordinals, int num, Channel channel, P2PGroup* out) {
  return all_meshes().group(ordinals, num, channel, out);
}

int stalled_rank(const int* ordinals, int num, int rank) { return all_meshes().stalled(ordinals, num, rank); }

int p2p_blocks(int threads) { return blocks_at_once(threads, kP2PThreads); }

std::string launch_one_shot(OneShotArgs args, bool is_sum, cudaStream_t stream) {
  const auto kernel = is_sum ? kernel_of<one_shot_kernel<true>>() : kernel_of<one_shot_kernel<false>>();
  kernel.function<<<p2p_blocks(args.num_pairs), kP2PThreads, 0, stream>>>(args);
  return text_of(cudaGetLastError());
}

std::string launch_two_shot(const P2PGroup& p2p, const void* x, void* out, size_t num_bytes, cudaStream_t stream) {
  if (!has_two_shots(p2p.num) || num_bytes % (p2p.num * sizeof(uint4)) != 0) {
    return "2 or 4 GPUs and a multiple of 16 bytes for each are needed";
  }
  const auto kernel = p2p.num == 2 ? kernel_of<two_shot_kernel<2>>() : kernel_of<two_shot_kernel<4>>();
  for (size_t at = 0; at < num_bytes; at += kTwoShotBytes) {
    TwoShotArgs args = {p2p};
    args.in = static_cast<const uint4*>(x) + at / sizeof(uint4);
    args.out = static_cast<uint4*>(out) + at / sizeof(uint4);
    args.chunk = static_cast<int>(std::min(kTwoShotBytes, num_bytes - at) / sizeof(uint4) / p2p.num);
    kernel.function<<<blocks_at_once(args.chunk, kTwoShotThreads), kTwoShotThreads, 0, stream>>>(args);
  }
  return text_of(cudaGetLastError());
}

}  // namespace meshserve
