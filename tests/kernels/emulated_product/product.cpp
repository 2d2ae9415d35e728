// Runs integer_product.cuh and what it includes on the host: the product of 64 rows of a tile with N tokens, one range
// of blocks.
#include "projection/sm90/integer_product.cuh"

#include <memory>
#include <vector>

using namespace meshserve;

namespace {

constexpr int kThreads = 128, kTileBytes = 64 * 128, kTable = 1 << 16, kExponents = kTable + (1 << 15);

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
  auto on_all_threads = [](auto body) {
    std::vector<std::unique_ptr<Warp>> warps;
    for (int w = 0; w < kThreads / 32; ++w) warps.push_back(std::make_unique<Warp>());
    CudaThreads threads(threadIdx, warp_state);
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        threadIdx.x = t;
        warp_state = warps[t / 32].get();
        body(static_cast<int>(t));
      });
    }
  };
  // The activations of all tokens in the form for the product; what is not written must not matter.
  const int columns = problem.columns, row_exponents = columns / kExponentColumns;
  std::vector<uint8_t> input(activation_bytes(problem.tokens, columns), 0xFF);
  bf16* activations = reinterpret_cast<bf16*>(input.data());
  uint8_t* exponents = exponents_of(activations, problem.tokens, columns);
  on_all_threads([&](int thread) {
    for (int token = 0; token < problem.tokens; ++token) {
      for (int column = 4 * thread; column < columns; column += 4 * kThreads) {
        const size_t row = static_cast<size_t>(token) * columns;
        const float* v = problem.input + row + column;
        store_activations<W>(activations + row, exponents + row / kExponentColumns, column, {v[0], v[1], v[2], v[3]});
      }
    }
  });
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
  table.first_column = problem.first_block * W::kBlockColumns;
  on_all_threads([&](int) {
    load_scales<W>(problem.scales, problem.row, 64, table.first_group, num_groups, kThreads, kTable);
    const int first = table.first_column / kExponentColumns, num = problem.num_blocks * kInputTiles;
    load_exponents<N>(exponents + first, row_exponents, problem.tokens, min(num, row_exponents - first), num, kThreads,
                      kExponents);
  });
  for (int block = problem.first_block; block < last_block; ++block) {
    std::memset(shared_memory, 0, kTileBytes + kInputTiles * kInputBytes);
    for (int row = 0; row < 64; ++row) {  // as the copy engine does, zero beyond the columns
      for (int byte = 0; byte < min(128, row_bytes - 128 * block); ++byte) {
        shared_memory[row * 128 + (byte ^ row % 8 * 16)] =
            problem.data[static_cast<size_t>(problem.row + row) * row_bytes + 128 * block + byte];
      }
    }
    for (int token = 0; token < problem.tokens; ++token) {
      const int first = block * W::kBlockColumns * 2;
      for (int byte = 0; byte < min(kTilesPerBlock<W> * 128, columns * 2 - first); ++byte) {
        const int at = byte / 128 * kInputBytes + token * 128 + (byte % 128 ^ token % 8 * 16);
        shared_memory[kTileBytes + at] = input[static_cast<size_t>(token) * columns * 2 + first + byte];
      }
    }
    on_all_threads([&](int thread) {
      const int warp = thread / 32, lane = thread % 32, row = warp * 16 + lane % 16;
      ScaleTable mine = table;
      mine.address = kTable + 4 * (entries == 8 ? warp : 16 * warp + lane / 4);
      mine.exponents = kExponents + 2 * (lane % 4);
      mine.num_tokens = problem.tokens;
      mine.has_zero = problem.scales.zero != nullptr;
      const uint32_t address = W::kIsSplit && !W::kIsInt4 ? 0 : row * 128 + ((lane / 16) ^ (row % 8)) * 16;
      auto& lane_sums = *reinterpret_cast<float (*)[N / 2]>(sums.data() + thread * (N / 2));
      BlockProduct<N, W>(lane_sums, address, kTileBytes, mine, block * W::kBlockColumns).run();
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
  if constexpr (!kIsSingle<W>) {
    if (n == 8) run<8, W>(problem, out);
  }
  if constexpr (!W::kIsInt4 || !W::kIsSplit) {
    if (n == 16) run<16, W>(problem, out);
    if (n == 32) run<32, W>(problem, out);
    if (n == 64) run<64, W>(problem, out);
  }
}

}  // namespace

// `form` of the product: split, converted, 4-bit, 4-bit with integer activations, or rounded to one number.
extern "C" void multiply(int form, int n, const Problem* problem, float* out) {
  if (form == 0) run<SplitFp8Weights>(n, *problem, out);
  if (form == 1) run<Fp8Weights>(n, *problem, out);
  if (form == 2) run<Int4Weights>(n, *problem, out);
  if (form == 3) run<IntegerInt4Weights>(n, *problem, out);
  if (form == 4) run<SingleFp8Weights>(n, *problem, out);
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
