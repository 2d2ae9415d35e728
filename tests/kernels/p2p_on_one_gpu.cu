// A mesh whose ranks are streams of one GPU, for testing the P2P kernels on a machine with one GPU. Shapes must be
// small enough for all blocks of all ranks to run at once; otherwise a waiting rank would keep the one it waits for
// from starting. All kernels are loaded first, because CUDA waits for the device when it loads a kernel at its first
// launch.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "collectives/two_shot.cuh"
#include "layers/step.cuh"

extern "C" int meshserve_load_kernels(const int* ordinals, int num, char* error, int size);

using namespace meshserve;

namespace {

// Empty inboxes of `num` ranks for one channel, and a stream per rank.
struct Mesh {
  explicit Mesh(int num) : Mesh(num, 2 * num * kSlotBytes) {}
  Mesh(int num, size_t bytes) : streams(num), groups(num) {
    int device = 0;
    cudaGetDevice(&device);
    char error[1000];
    if (!meshserve_load_kernels(&device, 1, error, sizeof(error))) fprintf(stderr, "%s\n", error);
    cudaMalloc(&memory, num * (bytes + 256));
    cudaMemset(memory, 0xFF, num * bytes);
    cudaMemset(memory + num * bytes, 0, num * 256);
    cudaHostAlloc(&stalled, kMaxRanks * sizeof(int), cudaHostAllocMapped);
    for (int rank = 0; rank < num; ++rank) {
      cudaStreamCreateWithFlags(&streams[rank], cudaStreamNonBlocking);
      P2PGroup& p = groups[rank];
      p = {};
      for (int i = 0; i < num; ++i) p.inboxes[i] = memory + (rank + i) % num * bytes;
      p.num = num;
      p.rank = rank;
      p.counter = reinterpret_cast<RoundCounter*>(memory + num * bytes + rank * 256);
      p.stalled = stalled;
      p.patience_nanoseconds = 3000000000ull;
    }
    cudaDeviceSynchronize();
  }
  ~Mesh() {
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
    cudaFree(memory);
    cudaFreeHost(stalled);
  }
  std::vector<cudaStream_t> streams;
  std::vector<P2PGroup> groups;
  uint8_t* memory = nullptr;
  int* stalled = nullptr;
};

int blocks_of_a_rank(int threads, int block_threads, int num) {
  return std::min((threads + block_threads - 1) / block_threads, 2 * num_multiprocessors() / num);
}

}  // namespace

// Arrays of each rank: weights[rank * 8 + i] in the order of Weights, the cache, and the x to be replaced.
struct Ranks {
  int num;
  const void* const* weights;
  void* const* caches;
  void* const* xs;
  const int *page_table, *positions;
  const float* inverse_frequencies;
};

// Runs all layers `repeats` times on the same x, with the result in x_out[rank]. Returns 0 or CUDA's error.
extern "C" int run_layers(const Ranks* ranks, const Shapes* shapes, float epsilon, float scale, float rotary_scale,
                          void* const* x_out, int repeats, char* error, int size) {
  Mesh mesh(ranks->num);
  const size_t scratch_bytes = Scratch::bytes(*shapes);
  std::vector<uint8_t*> scratch(ranks->num);
  for (uint8_t*& buffer : scratch) cudaMalloc(&buffer, scratch_bytes);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (int rank = 0; rank < ranks->num; ++rank) {
      Step<Bf16Weights> step(*shapes, Tuning{}, mesh.streams[rank]);
      auto weight = [&](int i) { return static_cast<const bf16*>(ranks->weights[rank * 8 + i]); };
      step.weights = {weight(0), weight(1), weight(2), weight(3), weight(4), weight(5), weight(6), weight(7)};
      step.cache = {ranks->caches[rank], false, ranks->page_table, ranks->positions};
      step.inverse_frequencies = ranks->inverse_frequencies;
      step.epsilon = epsilon;
      step.scale = scale;
      step.rotary_scale = rotary_scale;
      step.scratch.carve(*shapes, scratch[rank]);
      step.layers(static_cast<const bf16*>(ranks->xs[rank]), static_cast<bf16*>(x_out[rank]), 0, shapes->layers,
                  &mesh.groups[rank]);
      if (!step.error().empty()) return snprintf(error, size, "%s", step.error().c_str()), 1;
    }
  }
  const cudaError_t status = cudaDeviceSynchronize();
  for (uint8_t* buffer : scratch) cudaFree(buffer);
  return snprintf(error, size, "%s", cudaGetErrorString(status)), status;
}

// All-reduces (or all-gathers) `repeats` times: in [num, repeats, pairs], out [num, repeats, pairs or num * pairs].
extern "C" int run_one_shots(int num, int pairs, int repeats, int is_sum, const uint2* in, uint2* out, char* error,
                             int size) {
  Mesh mesh(num);
  const auto kernel = is_sum ? kernel_of<one_shot_kernel<true>>() : kernel_of<one_shot_kernel<false>>();
  const int blocks = blocks_of_a_rank(pairs, kP2PThreads, num);
  const size_t out_pairs = is_sum ? pairs : num * pairs;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (int rank = 0; rank < num; ++rank) {
      const size_t call = static_cast<size_t>(rank) * repeats + repeat;
      OneShotArgs args = {mesh.groups[rank], in + call * pairs, out + call * out_pairs, pairs};
      kernel.function<<<blocks, kP2PThreads, 0, mesh.streams[rank]>>>(args);
    }
  }
  const cudaError_t status = cudaDeviceSynchronize();
  return snprintf(error, size, "%s", cudaGetErrorString(status)), status;
}

// All-reduces in two shots `repeats` times: in and out [num, repeats, num, chunk].
extern "C" int run_two_shots(int num, int chunk, int repeats, const uint4* in, uint4* out, char* error, int size) {
  Mesh mesh(num, two_shot_inbox_bytes(num));
  const auto kernel = num == 2 ? kernel_of<two_shot_kernel<2>>() : kernel_of<two_shot_kernel<4>>();
  const int blocks = blocks_of_a_rank(chunk, kTwoShotThreads, num);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (int rank = 0; rank < num; ++rank) {
      const size_t first = (static_cast<size_t>(rank) * repeats + repeat) * num * chunk;
      const TwoShotArgs args = {mesh.groups[rank], in + first, out + first, chunk};
      kernel.function<<<blocks, kTwoShotThreads, 0, mesh.streams[rank]>>>(args);
    }
  }
  const cudaError_t status = cudaDeviceSynchronize();
  return snprintf(error, size, "%s", cudaGetErrorString(status)), status;
}
