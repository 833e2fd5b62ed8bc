// A matmul of PyTorch's in parts, each of which one thread computes.

#include <cstdint>

extern "C" {

// PyTorch's matmul into `out`, of its C interface for compiled models; returns an error's number or
// 0. Within a parallel region it takes one thread.
typedef int32_t (*Matmul)(void* out, void* left, void* right);

// Computes `n` parts: `tensors` has out, left and right of each. Returns 0, or errors' numbers.
int64_t pentameter_matmul_parts(Matmul matmul, void* const* tensors, int64_t n) {
    int32_t error = 0;
#pragma omp parallel for schedule(static) reduction(| : error)
    for (int64_t i = 0; i < n; i++)
        error |= matmul(tensors[3 * i], tensors[3 * i + 1], tensors[3 * i + 2]);
    return error;
}
}
