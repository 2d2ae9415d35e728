// Runs the kernels of p2p.cuh and two_shot.cuh on the host. Each rank is a host thread that starts its
// kernels one after another; each CUDA thread is a host thread, too.
#include "collectives/two_shot.cuh"

#include <algorithm>
#include <functional>
#include <thread>
#include <vector>

using namespace meshserve;

namespace {

class Mesh {
 public:
  explicit Mesh(int num, size_t inbox_bytes) : num_(num), counters_(num) {
    for (int rank = 0; rank < num; ++rank) inboxes_.emplace_back(inbox_bytes, 0xFF);
  }

  P2PGroup group(int rank) {
    P2PGroup p = {};
    for (int i = 0; i < num_; ++i) p.inboxes[i] = inboxes_[(rank + i) % num_].data();
    p.num = num_;
    p.rank = rank;
    p.counter = &counters_[rank];
    p.stalled = stalled_;
    p.patience_nanoseconds = 600000000000ull;  // long, because there are more threads than cores
    return p;
  }

  // Runs `body` for all ranks at the same time.
  void run(const std::function<void(int, const P2PGroup&)>& body) {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < num_; ++rank) ranks.emplace_back([&, rank] { body(rank, group(rank)); });
  }

  // Returns whether every slot is empty.
  bool is_empty() const {
    return std::all_of(inboxes_.begin(), inboxes_.end(), [](const auto& inbox) {
      return std::all_of(inbox.begin(), inbox.end(), [](uint8_t byte) { return byte == 0xFF; });
    });
  }

 private:
  int num_;
  std::vector<std::vector<uint8_t>> inboxes_;
  std::vector<RoundCounter> counters_;
  int stalled_[kMaxRanks] = {};
};

template <class Args>
void launch(void (*kernel)(Args), int blocks, const Args& args, unsigned num_threads = kP2PThreads) {
  std::vector<std::unique_ptr<Block>> state;
  std::vector<std::jthread> threads;
  for (int b = 0; b < blocks; ++b) {
    state.push_back(std::make_unique<Block>(num_threads));
    for (unsigned t = 0; t < num_threads; ++t) {
      threads.emplace_back([=, block_state = state.back().get(), &args] {
        threadIdx = {t};
        blockIdx = {static_cast<unsigned>(b)};
        gridDim = {static_cast<unsigned>(blocks)};
        block = block_state;
        kernel(args);
      });
    }
  }
}

}  // namespace

// in [num, repeats, pairs], out [num, repeats, pairs or num * pairs]. Returns whether all slots are empty afterwards.
extern "C" int run_one_shots(int num, int pairs, int repeats, int blocks, int is_sum, const uint2* in, uint2* out) {
  Mesh mesh(num, 2 * num * kSlotBytes);
  const size_t out_pairs = is_sum ? pairs : num * pairs;
  mesh.run([&](int rank, const P2PGroup& p2p) {
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const size_t call = static_cast<size_t>(rank) * repeats + repeat;
      OneShotArgs args = {p2p, in + call * pairs, out + call * out_pairs, pairs};
      launch(is_sum ? one_shot_kernel<true> : one_shot_kernel<false>, blocks, args);
    }
  });
  return mesh.is_empty();
}

// in and out [num, repeats, num, chunk]. Returns whether all slots are empty afterwards.
extern "C" int run_two_shots(int num, int chunk, int repeats, int blocks, const uint4* in, uint4* out) {
  Mesh mesh(num, two_shot_inbox_bytes(num));
  mesh.run([&](int rank, const P2PGroup& p2p) {
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const size_t first = (static_cast<size_t>(rank) * repeats + repeat) * num * chunk;
      TwoShotArgs args = {p2p, in + first, out + first, chunk};
      launch(num == 2 ? two_shot_kernel<2> : two_shot_kernel<4>, blocks, args, kTwoShotThreads);
    }
  });
  return mesh.is_empty();
}

// Adds shares [num, rounds, batch, columns] to x [num, batch, columns], one round after another. A thread sends them,
// as the projection would, while the gather kernel runs. `scaled`, of `scaled_bytes` each, and `sums` are those of the
// last round. `is_split`: the next projection has FP8 weights.
extern "C" int run_gathers(int num, int rounds, int batch, int columns, int blocks, const uint2* shares, bf16* x,
                           const bf16* gain, uint8_t* scaled, int scaled_bytes, float* sums, int is_split) {
  Mesh mesh(num, 2 * num * kSlotBytes);
  const size_t elements = static_cast<size_t>(batch) * columns;
  mesh.run([&](int rank, const P2PGroup& p2p) {
    for (int round = 0; round < rounds; ++round) {
      const uint2* share = shares + (static_cast<size_t>(rank) * rounds + round) * elements / 4;
      std::jthread projection([&] {
        for (size_t i = 0; i < elements / 4; ++i) send(p2p, round % 2, 8 * i, share[i]);
      });
      GatherArgs args = {};
      args.p2p = p2p;
      args.round = round % 2;
      args.residual = args.out = x + rank * elements;
      args.next_gain = gain;
      args.scaled_out = reinterpret_cast<bf16*>(scaled + static_cast<size_t>(rank) * scaled_bytes);
      args.sums_out = sums + rank * (elements / 128);
      args.batch = batch;
      args.columns = columns;
      launch(is_split ? gather_kernel<SplitFp8Weights> : gather_kernel<>, blocks, args);
    }
  });
  return mesh.is_empty();
}
