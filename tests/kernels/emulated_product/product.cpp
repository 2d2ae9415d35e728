// Runs quantised.cuh on the host: the product of 64 rows of a tile with N tokens, one range of blocks.
#include "quantised.cuh"

#include <memory>
#include <thread>
#include <vector>

using namespace meshserve;

namespace {

constexpr int kThreads = 128, kTileBytes = 64 * 128, kTable = 1 << 16;

struct Problem {
  int tokens, columns, row, first_block, num_blocks;  // `row`: the first of the tile in the matrix
  const uint8_t* data;                                // [rows, bytes of a row]
  const float* input;                                 // [tokens, columns]
  Scales scales;
};

template <int N, class W>
void run(const Problem& problem, float* out) {  // out [64, N]
  constexpr int kInputTiles = W::kBlockColumns / 64, kInputBytes = N * 128;
  const int row_bytes = problem.columns * 128 / W::kBlockColumns;
  // The activations of all tokens, in order for the product; a block may exceed the columns.
  const int padded = (problem.columns + W::kBlockColumns - 1) / W::kBlockColumns * W::kBlockColumns;
  std::vector<bf16> ordered(static_cast<size_t>(N) * padded);
  for (int token = 0; token < problem.tokens; ++token) {
    for (int column = 0; column < problem.columns; column += 4) {
      const float* v = problem.input + static_cast<size_t>(token) * problem.columns + column;
      store_activations<W>(ordered.data() + static_cast<size_t>(token) * padded, column, {v[0], v[1], v[2], v[3]});
    }
  }
  std::vector<float> sums(kThreads * (N / 2), 0.0f);
  const int last_block = problem.first_block + problem.num_blocks, entries = scale_entries(problem.scales.rows_each);
  ScaleTable table = {};
  table.columns_log2 = problem.scales.columns_log2;
  table.first_group = problem.first_block * W::kBlockColumns >> table.columns_log2;
  table.last_group = (last_block * W::kBlockColumns - 1) >> table.columns_log2;
  table.group_bytes = 4 * entries;
  table.second = entries == 8 ? 0 : 4 * 8;
  const int num_groups = table.last_group - table.first_group + 1;
  if (num_groups > scale_groups(problem.num_blocks, W::kBlockColumns, table.columns_log2)) std::abort();
  auto on_all_threads = [](auto body) {
    std::vector<std::unique_ptr<Warp>> warps;
    for (int w = 0; w < kThreads / 32; ++w) warps.push_back(std::make_unique<Warp>());
    std::vector<std::jthread> threads;
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        threadIdx.x = t;
        warp_state = warps[t / 32].get();
        body(static_cast<int>(t));
      });
    }
  };
  on_all_threads(
      [&](int) { load_scales<W>(problem.scales, problem.row, 64, table.first_group, num_groups, kThreads, kTable); });
  for (int block = problem.first_block; block < last_block; ++block) {
    std::memset(shared_memory, 0, kTileBytes + kInputTiles * kInputBytes);
    for (int row = 0; row < 64; ++row) {  // as the copy engine does, zero beyond the columns
      for (int byte = 0; byte < min(128, row_bytes - 128 * block); ++byte) {
        shared_memory[row * 128 + (byte ^ row % 8 * 16)] =
            problem.data[static_cast<size_t>(problem.row + row) * row_bytes + 128 * block + byte];
      }
    }
    for (int token = 0; token < N; ++token) {
      for (int k = 0; k < W::kBlockColumns; ++k) {
        const int at = k / 64 * kInputBytes + token * 128 + (k % 64 * 2 ^ token % 8 * 16);
        const bf16 value = ordered[static_cast<size_t>(token) * padded + block * W::kBlockColumns + k];
        std::memcpy(shared_memory + kTileBytes + at, &value, 2);
      }
    }
    on_all_threads([&](int thread) {
      const int warp = thread / 32, lane = thread % 32, row = warp * 16 + lane % 16;
      ScaleTable mine = table;
      mine.address = kTable + 4 * (entries == 8 ? warp : 16 * warp + lane / 4);
      const uint32_t lane_address = row * 128 + ((lane / 16) ^ (row % 8)) * 16;
      auto& lane_sums = *reinterpret_cast<float (*)[N / 2]>(sums.data() + thread * (N / 2));
      BlockProduct<N, W>(lane_sums, lane_address, kTileBytes, mine, block * W::kBlockColumns).run();
    });
  }
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int i = 0; i < N / 2; ++i) {
      const int lane = thread % 32, row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
      out[row * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[thread * (N / 2) + i];
    }
  }
}

template <class W>
void run(int n, const Problem& problem, float* out) {
  if (n == 8) run<8, W>(problem, out);
  if (n == 16) run<16, W>(problem, out);
  if (n == 32) run<32, W>(problem, out);
  if (n == 64) run<64, W>(problem, out);
}

}  // namespace

extern "C" void multiply(int is_int4, int n, const Problem* problem, float* out) {
  is_int4 ? run<Int4Weights>(n, *problem, out) : run<Fp8Weights>(n, *problem, out);
}

// Converts all 256 e4m3 numbers to float32.
extern "C" void convert(float* out) {
  for (uint32_t first = 0; first < 256; first += 4) {
    uint32_t even, odd;
    convert_e4m3(first | (first + 1) << 8 | (first + 2) << 16 | (first + 3) << 24, even, odd);
    out[first] = from_bf16(even & 0xFFFF), out[first + 2] = from_bf16(even >> 16);
    out[first + 1] = from_bf16(odd & 0xFFFF), out[first + 3] = from_bf16(odd >> 16);
  }
}
