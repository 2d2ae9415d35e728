// Projections with 4-bit weights: on the integer tensor cores, or converted.
#include "projection/sm90/launch_format.cuh"

namespace meshserve {

MESHSERVE_PROJECTION(kQkv, IntegerInt4Weights, 8);
MESHSERVE_PROJECTION(kResidual, IntegerInt4Weights, 8);
MESHSERVE_PROJECTION(kGateUp, IntegerInt4Weights, 8);
MESHSERVE_PROJECTION(kShare, IntegerInt4Weights, 8);

MESHSERVE_PROJECTION(kQkv, Int4Weights, 16 | 32 | 64);
MESHSERVE_PROJECTION(kResidual, Int4Weights, 16 | 32 | 64);
MESHSERVE_PROJECTION(kGateUp, Int4Weights, 16 | 32 | 64);
MESHSERVE_PROJECTION(kShare, Int4Weights, 16 | 32 | 64);

}  // namespace meshserve
