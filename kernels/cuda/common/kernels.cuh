// The kernels that this library launches. `kernel_of` lists a kernel wherever it names one, so that `load_kernels`
// loads all of them onto the GPUs before any program runs.
//
// Otherwise CUDA would load a kernel at its first launch. That may happen while XLA captures a command buffer, or when
// XLA has taken all device memory. Loading also waits for the device, which on a mesh may itself be waiting for another
// whose kernels are launched later.
#pragma once
#include <vector>

namespace meshserve {

template <class... Parameters>
struct Kernel {
  void (*function)(Parameters...);
};

inline std::vector<const void*>& listed_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

template <auto* kFunction>
struct Listed {
  static inline const bool value = (listed_kernels().push_back(reinterpret_cast<const void*>(kFunction)), true);
};

template <class... Parameters>
Kernel<Parameters...> as_kernel(void (*function)(Parameters...)) {
  return {function};
}

template <auto* kFunction>
auto kernel_of() {
  static_cast<void>(Listed<kFunction>::value);  // instantiates it, so that it is initialized with the library
  return as_kernel(kFunction);
}

}  // namespace meshserve
