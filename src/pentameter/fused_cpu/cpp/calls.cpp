// Calls of C++ functions that are made again one after another.

#include <cstddef>
#include <cstdint>
#include <utility>

// A call, with the same fields as `_Call` in captured/native_calls.py: a function of at most MOST addresses
// and numbers. If `checked`, its result is 0 unless it fails.
struct Call {
    void* function;
    const int64_t* arguments;
    int64_t n, checked;
};

namespace {

constexpr size_t MOST = 12;

template <size_t>
using Word = int64_t;  // an address is passed as a number of as many bytes is

template <size_t... I>
int64_t call(const Call& made, std::index_sequence<I...>) {
    return ((int64_t(*)(Word<I>...))made.function)(made.arguments[I]...);
}

template <size_t N = 0>
int64_t call(const Call& made) {
    if constexpr (N < MOST)
        if (made.n != N) return call<N + 1>(made);
    return call(made, std::make_index_sequence<N>());
}

}  // namespace

extern "C" {

// Makes `n` calls. Returns 0, or the result of a checked one that failed, after which none is made.
int64_t pentameter_make_calls(const Call* calls, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t result = call(calls[i]);
        if (calls[i].checked && result != 0) return result;
    }
    return 0;
}
}
