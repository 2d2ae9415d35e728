// Hopper's instructions are replaced with the others.
#pragma once
#include "common/ptx.cuh"
