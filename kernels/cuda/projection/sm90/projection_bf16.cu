// Projections with weights in bf16.
#include "projection/sm90/launch_format.cuh"

namespace meshserve {

MESHSERVE_PROJECTION(kQkv, Bf16Weights, 8 | 16 | 32 | 64);
MESHSERVE_PROJECTION(kResidual, Bf16Weights, 8 | 16 | 32 | 64);
MESHSERVE_PROJECTION(kGateUp, Bf16Weights, 8 | 16 | 32 | 64);
MESHSERVE_PROJECTION(kShare, Bf16Weights, 8 | 16 | 32 | 64);
MESHSERVE_PROJECTION(kRouted, Bf16Weights, 8);
MESHSERVE_PROJECTION(kAttend, Bf16Weights, 8);
MESHSERVE_PROJECTION(kAttendFp8, Bf16Weights, 8);

}  // namespace meshserve
