// Joins the splits of decode.metal: one SIMD group per (query head, sequence).

const int head = threadgroup_position_in_grid.x;
const int seq = threadgroup_position_in_grid.y;
const int lane = thread_index_in_simdgroup;

const int len = context_lens[seq];
const int split_tokens = tokens_per_split<SPLIT_SMALLEST, SPLIT_LARGEST, SPLIT_ENOUGH>(len);
const int splits = (len + split_tokens - 1) / split_tokens;
const int64_t row = int64_t(seq) * QUERY_HEADS + head;
const int64_t first = row * partial_out_shape[2];  // later splits than `splits` were never written

float top = LOWEST;
for (int s = lane; s < splits; s += 32) {
    top = max(top, partial_stats[(first + s) * 2]);
}
top = simd_max(top);
for (int i = lane; i < D / 4; i += 32) {
    float sum = 0;
    float4 mixed = float4(0);
    for (int s = 0; s < splits; s++) {
        // Precise: a lone split must weigh exactly 1, or it would differ from the direct path.
        const float weight = precise::exp2(partial_stats[(first + s) * 2] - top);
        sum += weight * partial_stats[(first + s) * 2 + 1];
        mixed += weight * ((const device float4*)partial_out)[(first + s) * (D / 4) + i];
    }
    ((device vec<T, 4>*)out)[row * (D / 4) + i] = vec<T, 4>(len > 0 ? mixed / sum : float4(0));
}
