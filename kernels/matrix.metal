// Where the 64 elements of an 8x8 matrix lie in a SIMD group: a lane holds two neighbours of one row.
//
// Apple doesn't document the map. MLX's own kernels rely on it, and so does the row-wise softmax here.

#include <metal_simdgroup_matrix>

int fragment_row(int lane) {
    return (lane / 4 & 4) + lane / 2 % 4;
}

// The first of the two.
int fragment_column(int lane) {
    return (lane / 4 & 2) * 2 + lane % 2 * 2;
}

// Over the four lanes that hold a row, in all of them.
float row_max(float x) {
    x = max(x, simd_shuffle_xor(x, ushort(1)));
    return max(x, simd_shuffle_xor(x, ushort(8)));
}

float row_sum(float x) {
    x += simd_shuffle_xor(x, ushort(1));
    return x + simd_shuffle_xor(x, ushort(8));
}
