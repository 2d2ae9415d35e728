// The host side of projections: how a matrix is divided among blocks, and what their shared memory holds.
#pragma once
#include "common/launch.cuh"
#include "projection/sm90/arguments.cuh"

namespace meshserve {

// Overrides of the launch shapes, for benchmarks; 0 selects the default.
struct Tuning {
  int qkv_splits = 0, o_splits = 0, gate_up_splits = 0, down_splits = 0, attention_splits = 0;
  int blocks_per_stage = 0, pipeline_kilobytes = 0;
  int streams = 0;  // 2: the halves of the batch run on two streams
};

// One projection of a step: [batch, rows] = input [batch, columns] matrix [rows, columns]^T.
struct Projection {
  const char* name;
  int layers;         // in the stack that the matrix belongs to
  int rows, columns;  // the matrix of one layer
  int tiles;          // a tile has kTileRows rows; KV heads if the cluster attends
  const bf16* input;
  int splits = 0;  // ranges of columns; 0: chosen
  int blocks_per_stage = 0, pipeline_kilobytes = 0;
  int priority = 0;
};

// Launches a projection with the widest product that its tokens fill. `matrix` is a stack of the layers' matrices.
template <Epilogue E, class W>
void launch_projection(LaunchSequence& sequence, const Projection& projection, const typename W::Matrix& matrix,
                       ArgsOf<E, W> args);

// ---- what is the same for all formats ----------------------------------------------------------------------------

// What the plan of a projection depends on.
struct ProjectionShape {
  int width;  // tokens of a product, the kernel's N
  int columns, block_columns;
  int splits;
  bool is_quantized, has_exponents, splits_input;
  int input_tiles_each;                   // tiles of activations that a block of columns takes in the pipeline
  int table_columns_log2, table_entries;  // scales: columns of a group, entries of a group
  int head_blocks, head_round_bytes, head_early_stages;  // for a cluster that attends; 0: it does not
  int blocks_per_stage, pipeline_kilobytes;
};

// How the blocks of a projection use their shared memory. See ProjectionArgs and HeadArgs.
struct ProjectionPlan {
  int k_blocks, stages, blocks_per_stage;
  bool is_resident;
  int table_offset, exponent_offset, pipeline_bytes, shared_bytes;
  int head_stages, head_page_offset;
};

// Returns the number of ranges of columns for `tiles` tiles of `k_blocks` blocks of 64 columns. A tile is counted once
// for each group of `width` tokens.
int choose_splits(int tiles, int k_blocks, int width, bool has_short_blocks);

// Plans a projection; `error` says why that is not possible.
ProjectionPlan plan_projection(const ProjectionShape& shape, std::string* error);

}  // namespace meshserve
