// Projections with FP8 weights. Steps of up to 32 tokens split their activations, those of up to 64 round them where
// they may; the others convert weights, as do those of 2 to 8 tokens of layers with experts. The output head is read
// once for 64 tokens.
#include "projection/sm90/launch_format.cuh"

namespace meshserve {

MESHSERVE_PROJECTION(kQkv, Fp8Weights, 8 | 64);
MESHSERVE_PROJECTION(kResidual, Fp8Weights, 8 | 64);
MESHSERVE_PROJECTION(kGateUp, Fp8Weights, 64);
MESHSERVE_PROJECTION(kShare, Fp8Weights, 64);
MESHSERVE_PROJECTION(kRouted, Fp8Weights, 8);

MESHSERVE_PROJECTION(kQkv, SplitFp8Weights, 8 | 16 | 32);
MESHSERVE_PROJECTION(kResidual, SplitFp8Weights, 8 | 16 | 32);
MESHSERVE_PROJECTION(kGateUp, SplitFp8Weights, 8 | 16 | 32);
MESHSERVE_PROJECTION(kShare, SplitFp8Weights, 8 | 16 | 32);
MESHSERVE_PROJECTION(kLogits, SplitFp8Weights, 8 | 16 | 32 | 64);

MESHSERVE_PROJECTION(kQkv, SingleFp8Weights, 32 | 64);
MESHSERVE_PROJECTION(kResidual, SingleFp8Weights, 32 | 64);
MESHSERVE_PROJECTION(kGateUp, SingleFp8Weights, 32 | 64);

}  // namespace meshserve
