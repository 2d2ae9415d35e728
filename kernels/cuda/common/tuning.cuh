// The constants that were chosen by measurement on H100s and H200s, each with the entry of docs/log that shows it.
// Results do not depend on them but for the order of sums. What follows from an instruction or from a layout in shared
// memory stands beside its kernel instead.
#pragma once

namespace meshserve::tuned {

// ---- projections -------------------------------------------------------------------------------------------------
// Blocks of a projection, on the 132 SMs of an H100 SXM or H200; other GPUs take the same share. Two fit on an SM, and
// about 200 leave room for the next kernel's weights (first_days.md: number of split-K ranges).
constexpr int kMeasuredMultiprocessors = 132;
constexpr int kFewestBlocks = 120, kFewestBlocksOf64Tokens = 64;  // fewer are worse than short ranges
constexpr int kMostBlocks = 224, kMostUnevenBlocks = 208;         // for ranges of equal and of unequal lengths
// Blocks of 64 columns of a range (first_days.md, as above: "8 blocks of 64 are best; a second wave pays only for long
// ranges").
constexpr int kShortestRange = 8, kShortestNeededRange = 4;
constexpr int kShortestUnevenRange = 12, kShortestUnevenNarrowRange = 24;
constexpr int kLongHalvedRange = 40;  // of twice as many blocks as run at once
constexpr int kHalvedNarrowRange = 16, kHalvedRangeOf32Tokens = 20, kHalvedRangeOf64Tokens = 24;  // if that is evener
constexpr int kLastWaveRange = 16, kLastWaveRangeOfSplitFp8 = 24;
// The pipeline of a block: 96 or 104 KB are equal or slower (first_days.md), 80 KB slower (decode.md, 2026-11-28: an
// FP8 8B's steps of 17 to 128).
constexpr int kPipelineKilobytes = 112;
constexpr int kBlocksPerStage = 2;

// ---- activations of quantized weights, by the tokens of a step ---------------------------------------------------
// Integer activations of 4-bit weights: 1.95 to 2.17 ms of an 8B's layers instead of 2.39 to 2.41; with 16 tokens 2.72
// instead of 2.64 (decode.md, 2026-11-25: FP8 and 4-bit weights in whole steps).
constexpr int kMostIntegerTokens = 8;
// Split activations of FP8 weights: 2 % faster with 32 tokens than conversion to bf16, 6 % slower with 64 (decode.md,
// 2026-11-25: FP8 weights on the FP8 tensor cores).
constexpr int kMostSplitTokens = 32;
// Single activations, where they may be rounded: 9 % of a step with 32 tokens, 5 % with 64 (decode.md, 2026-11-28: an
// FP8 8B's steps of 17 to 128); in layers with experts, 3 % of a layer with 128 tokens (decisions/077).
constexpr int kFewestSingleTokens = 17, kMostSingleTokens = 64, kFewestRoutedSingleTokens = 65;

// ---- QKV merged with attention -----------------------------------------------------------------------------------
// Weights of a block, all of which are on their way before the previous kernel ends: 9 to 12 % of a 0.6B's layer
// (decode.md, 2026-11-26: QKV and attention in one kernel). FP8 layers as small are dequantized (decisions/078).
constexpr int kMostMergedBytes = 128 * 1024;

// ---- decode attention --------------------------------------------------------------------------------------------
constexpr int kWarpPipelineBytes = 24 * 1024;  // 4 warps x 24 KB: two blocks per SM, 192 KB in flight
// The same in three blocks, with an 8-bit cache and more than two rounds of two blocks per SM, or if all run at once
// (decode.md, 2026-11-26: what limits decode attention with an 8-bit KV cache, and without rounds of blocks).
constexpr int kShortWarpPipelineBytes = 16 * 1024;
// Requests from which tiles of an 8-bit cache have 32 tokens: 1 to 7 % of a step; a single request is 3 % slower
// (decode.md, 2026-11-26: an 8-bit KV cache in copies of 32 tokens).
constexpr int kFewestLongTileRequests = 8;
constexpr int kLeastShareTokens = 512;  // of a part of a context, for each block (decisions/030, first_days.md)
constexpr int kFewestSplitRounds = 4;   // tiles of a warp below which a context is not divided among a cluster
// Persistent blocks beside the other half of a batch, and the items for each SM from which they serve: 20 % less time a
// layer with 256 requests on a 0.6B (decode.md, 2026-11-28: persistent attention, beside the other half's projections).
constexpr int kPersistentWarps = 4, kPersistentStages = 3, kFewestItemsBeside = 2;
// The same where nothing runs beside attention: 4.5 % less time a step with 256 requests on an 8B (decode.md,
// 2026-11-28: persistent attention of unfused steps).
constexpr int kLonePersistentWarps = 8, kLonePersistentStages = 2, kFewestLoneItems = 11;

// ---- experts -----------------------------------------------------------------------------------------------------
// Tokens of an expert on average up to which tiles are narrow: with bf16 weights, and on the FP8 tensor cores
// (experts.md: kernels for the FP8 tensor cores; decisions/037).
constexpr int kMostNarrowTokens = 8, kMostNarrowFp8Tokens = 48;
// Up to which the kernels of a decode step compute the permutation themselves: 2 to 4 % of a layer in FP8, 1.5 % in
// bf16 (experts.md, 2026-11-26: FP8 decode steps without a kernel that orders tokens, and bfloat16 steps without the
// order).
constexpr int kMostPermutingTokens = 8, kMostPermutingFp8Tokens = 16;
constexpr int kFewestPairTokens = 48;    // from which pairs of blocks take a tile's weights (experts.md, 2026-11-28)
constexpr int kFewestManyTokens = 2048;  // of a step, from which a warp copies and sums a whole token (experts.md: 543
                                         // to 478 us a layer)
constexpr int kFewestLargeBoxTokens = 32;  // of an expert on average, below which copies of tokens are small

}  // namespace meshserve::tuned
