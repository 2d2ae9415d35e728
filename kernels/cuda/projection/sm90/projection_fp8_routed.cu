// Projections with FP8 weights of layers with experts, which leave their results in another form than they take.
#include "projection/sm90/launch_format.cuh"

namespace meshserve {

MESHSERVE_PROJECTION(kResidual, RoutedFp8Weights, 16 | 32);

MESHSERVE_PROJECTION(kQkv, RoutedSingleFp8Weights, 64);
MESHSERVE_PROJECTION(kResidual, RoutedSingleFp8Weights, 64);

MESHSERVE_PROJECTION(kQkv, OneTokenFp8Weights, 8);
MESHSERVE_PROJECTION(kResidual, OneTokenFp8Weights, 8);
MESHSERVE_PROJECTION(kRouted, OneTokenFp8Weights, 8);

}  // namespace meshserve
