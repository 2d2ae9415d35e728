// The kernels of a layer's experts, in order, for all GPUs since Ampere.
//
// Few tokens take two kernels. Many take those of order.cuh around the two of tiles. Which of them run, and their
// grids, follow from shapes alone, so that a step can be captured in a graph.
#pragma once
#include <stddef.h>

#include <algorithm>
#include <type_traits>

#include "common/kernels.cuh"
#include "experts/sm80/few_tokens.cuh"
#include "experts/sm80/many_tokens.cuh"

namespace meshserve::experts::sm80 {

enum class WeightFormat { kBf16, kE4m3, kInt4 };

struct Shapes {
  int tokens, chosen, experts, embed, mlp;
  WeightFormat format;

  int choices() const { return tokens * chosen; }
  int chunks() const { return (tokens + kMaxTokens - 1) / kMaxTokens; }
};

struct Call {
  const bf16* x;        // [T, D]
  Stack gate_up, down;  // [L, E, 2, F, D], [L, E, D, F]
  const int* experts;   // [T, k]
  const float* shares;  // [T, k]
  bf16* out;            // [T, D]
  uint8_t* scratch;     // scratch_bytes()
  int layer;
  int num_experts;      // that the tokens chose from, on all devices together
  int most_few_tokens;  // of a step by rows of weights
};

// Tokens of an expert on average up to which its tiles have 32, and 64.
constexpr int kMostMeanTokensOf32 = 24, kMostMeanTokensOf64 = 96;
constexpr int kFewestTileTokens = 32;
constexpr int kGateUpBlocksEach = 2;  // of few tokens, on a multiprocessor that has the shared memory

// Parts of the scratch memory.
struct Scratch {
  bf16* activated;     // [T k, F]
  bf16* rows;          // [T k, D]
  bf16* ordered;       // [T, D]
  int *slots, *order;  // [T k]
  int* counts;         // [chunks, kMaxExperts]
  SlotTile* tiles;
  int* num_tiles;

  size_t carve(const Shapes& s, uint8_t* buffer) {
    size_t used = 0;
    auto take = [&](auto& pointer, size_t elements) {
      pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(buffer + used);
      used += (elements * sizeof(*pointer) + 255) / 256 * 256;
    };
    const size_t choices = s.choices();
    take(activated, choices * s.mlp);
    take(rows, choices * s.embed);
    take(ordered, s.format == WeightFormat::kBf16 ? 0 : static_cast<size_t>(s.tokens) * s.embed);
    take(slots, choices);
    take(order, choices);
    take(counts, static_cast<size_t>(s.chunks()) * kMaxExperts);
    take(tiles, most_tiles(s.choices(), s.experts, kFewestTileTokens));
    take(num_tiles, 1);
    return used;
  }
};

// Blocks of a launch.
struct Grid {
  explicit Grid(int columns, int rows = 1) : x(columns), y(rows) {}
  unsigned x, y;
};

// Run: (kernel, grid, threads of a block, its bytes of shared memory, arguments...), and `num_multiprocessors`.
template <class Run>
class Schedule {
 public:
  Schedule(const Shapes& shapes, const Call& call, Run& run) : shapes_(shapes), call_(call), run_(run) {
    scratch_.carve(shapes, call.scratch);
  }

  template <class W>
  void experts() {
    const bool is_few = shapes_.tokens <= std::min(call_.most_few_tokens, kFewTokens) &&
                        shapes_.choices() <= kFewChoices && shapes_.mlp % kChunkColumns<W> == 0 &&
                        shapes_.embed % kChunkColumns<W> == 0;
    if (is_few) {
      few_tokens<W>();
    } else {
      const int mean = shapes_.choices() / std::max(call_.num_experts, 1);
      constexpr int kStages = W::kBits == 16 ? 3 : 4;
      if (mean <= kMostMeanTokensOf32) {
        many_tokens<W, Form<W, 2, 1, 4>>();
      } else if (mean <= kMostMeanTokensOf64) {
        many_tokens<W, Form<W, 4, 1, kStages>>();
      } else {
        many_tokens<W, Form<W, 4, 2, kStages>>();
      }
    }
  }

 private:
  template <class W>
  void few_tokens() {
    FewArgs gate_up = {};
    gate_up.x = call_.x;
    gate_up.weights = call_.gate_up;
    gate_up.experts = call_.experts;
    gate_up.shares = call_.shares;
    gate_up.out = scratch_.activated;
    gate_up.num_tokens = shapes_.tokens;
    gate_up.num_chosen = shapes_.chosen;
    gate_up.num_experts = shapes_.experts;
    gate_up.layer = call_.layer;
    gate_up.rows = shapes_.mlp;
    gate_up.columns = shapes_.embed;
    FewArgs down = gate_up;
    down.x = scratch_.activated;
    down.weights = call_.down;
    down.out = call_.out;
    down.rows = shapes_.embed;
    down.columns = shapes_.mlp;
    // No more tiles than choices.
    const int units = shapes_.choices() * (shapes_.mlp / kUnitRows);
    const Grid blocks(std::min(kGateUpBlocksEach * run_.num_multiprocessors(), units));
    run_(kernel_of<few_gate_up_kernel<W>>(), blocks, kThreads, sizeof(FewGateUpMemory), gate_up);
    // The most that any step needs: a captured launch must not see a limit set for another.
    run_(kernel_of<few_down_kernel<W>>(), Grid(shapes_.embed / kDownRows), kThreads, few_down_bytes(kFewChoices), down);
  }

  template <class W, class F>
  void many_tokens() {
    PlaceArgs place = {};
    place.arrange.experts = call_.experts;
    place.arrange.shares = call_.shares;
    place.arrange.counts = scratch_.counts;
    place.arrange.slots = scratch_.slots;
    place.arrange.num_tokens = shapes_.tokens;
    place.arrange.num_chosen = shapes_.chosen;
    place.arrange.num_experts = shapes_.experts;
    place.order = scratch_.order;
    place.tiles = scratch_.tiles;
    place.num_tiles = scratch_.num_tiles;
    place.tile_tokens = F::kTokens;
    const Grid chunks(shapes_.chunks());
    if (chunks.x > 1) run_(kernel_of<count_choices_kernel<W>>(), chunks, kThreads, sizeof(Choices), place.arrange);
    run_(kernel_of<place_kernel<W>>(), chunks, kThreads, sizeof(Choices), place);

    TileArgs gate_up = {};
    gate_up.x = call_.x;
    if constexpr (W::kIsScaled) {
      const size_t total = static_cast<size_t>(shapes_.tokens) * shapes_.embed, each = 4 * kThreads;
      run_(kernel_of<order_columns_kernel<W>>(), Grid(static_cast<int>((total + each - 1) / each)), kThreads, 0,
           call_.x, scratch_.ordered, shapes_.embed, total);
      gate_up.x = scratch_.ordered;
    }
    gate_up.order = scratch_.order;
    gate_up.weights = call_.gate_up;
    gate_up.tiles = scratch_.tiles;
    gate_up.num_tiles = scratch_.num_tiles;
    gate_up.out = scratch_.activated;
    gate_up.num_chosen = shapes_.chosen;
    gate_up.num_experts = shapes_.experts;
    gate_up.layer = call_.layer;
    gate_up.rows = shapes_.mlp;
    gate_up.columns = shapes_.embed;
    TileArgs down = gate_up;
    down.x = scratch_.activated;
    down.order = nullptr;
    down.weights = call_.down;
    down.out = scratch_.rows;
    down.rows = shapes_.embed;
    down.columns = shapes_.mlp;
    const int tiles = most_tiles(shapes_.choices(), shapes_.experts, F::kTokens);
    const int gate_up_blocks = (2 * shapes_.mlp + kBlockRows - 1) / kBlockRows;
    run_(kernel_of<tiles_kernel<F, false>>(), Grid(gate_up_blocks, tiles), F::kTileThreads, F::kSharedBytes, gate_up);
    run_(kernel_of<tiles_kernel<F, true>>(), Grid((shapes_.embed + kBlockRows - 1) / kBlockRows, tiles),
         F::kTileThreads, F::kSharedBytes, down);

    CombineArgs combine = {};
    combine.rows = scratch_.rows;
    combine.slots = scratch_.slots;
    combine.shares = call_.shares;
    combine.out = call_.out;
    combine.num_chosen = shapes_.chosen;
    combine.columns = shapes_.embed;
    run_(kernel_of<combine_slots_kernel<W>>(), Grid(shapes_.tokens), kThreads, 0, combine);
  }

  const Shapes shapes_;
  const Call call_;
  Run& run_;
  Scratch scratch_;
};

// Calls `function` with the format of a call's weights.
template <class Function>
void with_format(const Shapes& shapes, const Call& call, Function function) {
  if (shapes.format == WeightFormat::kBf16) return function(Bf16());
  if (shapes.format == WeightFormat::kE4m3) return function(E4m3());
  constexpr int kLeastLog2 = 7;
  static_assert(1 << kLeastLog2 == Int4<128>::kSpan);
  const bool is_coarse = std::min(call.gate_up.scales.columns_log2, call.down.scales.columns_log2) >= kLeastLog2;
  is_coarse ? function(Int4<128>()) : function(Int4<32>());
}

}  // namespace meshserve::experts::sm80
