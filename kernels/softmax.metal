// What the decode and merge kernels share: how a sequence is split, and the running softmax's terms.

#define UNROLL _Pragma("clang loop unroll(full)")

// Where a running maximum starts. Finite, so that LOWEST - LOWEST is 0 and not NaN.
constant constexpr float LOWEST = -3.0e38f;

// Tokens in each split of a sequence: `Splits.tokens` in launch.py, where the reasons are, says the
// same to the host. Only the sequence's own length counts, so its batch mates can't change its bits.
template <int SMALLEST, int LARGEST, int ENOUGH>
int tokens_per_split(int len) {
    int tokens = SMALLEST;
    while (tokens < LARGEST && len > tokens * ENOUGH) {
        tokens *= 2;
    }
    return tokens;
}

// The sum over each run of LANES neighbouring lanes, in all of them.
template <int LANES>
float sum_over_lanes(float x) {
    UNROLL for (int step = LANES / 2; step > 0; step /= 2) {
        x += simd_shuffle_xor(x, ushort(step));
    }
    return x;
}
